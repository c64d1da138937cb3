// Texts whose tokens are coloured, with a tip for the token under the pointer or the keys.

const tip = document.getElementById('tip');

function hideTip() {
  tip.hidden = true;
}

/** Show the tip beside an element, inside the window. */
function showTip(element, ...children) {
  clear(tip, ...children).hidden = false;
  const box = element.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(innerWidth - width - 8, box.left));
  const below = box.bottom + 8 + height < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - height - 8)}px`;
}

/** The reader's arrays of a model, ready to use. */
async function readerOf(model) {
  const { reader } = model;
  const [first, strings, string, cluster, documents] = await Promise.all(
    [reader.first, reader.strings, reader.string, reader.cluster, model.documents].map(unpack),
  );
  const place = new Map(reader.documents.map((document, index) => [document, index]));
  return {
    documents,
    /** Tokens of a document of the sample: [start, end), or null if it cannot be read here. */
    span: (document) => (place.has(document) ? [first.values[place.get(document)], first.values[place.get(document) + 1]] : null),
    text: (token) => strings[string.values[token]],
    cluster: (token) => cluster.values[token],
  };
}

/** The layer of the reader nearest to `layer`: large models have some layers only. */
function readerLayer(model, layer) {
  const { layers } = model.reader;
  return layers.reduce((best, one, index) => (Math.abs(one - layer) < Math.abs(layers[best] - layer) ? index : best), 0);
}

/** Experts and weights of every token in one of the reader's layers. */
async function routingOf(model, index) {
  const { ids, weights } = model.reader.routing[index];
  const [known, shares] = await Promise.all([unpack(ids), unpack(weights)]);
  const active = known.shape[1];
  return (token) => Array.from({ length: active }, (_, place) => [known.values[token * active + place], shares.values[token * active + place]]);
}

/**
 * Tokens [start, end) of a reader as a text. `label` gives the number that colours a token (null: none); `tell` gives the
 * children of its tip. Tokens that carry no character of their own are drawn as a small mark.
 */
function tokenText(reader, [start, end], { label, tell, numbers = false, name }) {
  const text = el('div', { class: `tokens${numbers ? ' numbered' : ''}`, dir: 'auto', tabindex: 0, role: 'group', 'aria-label': name });
  for (let token = start; token < end; token++) text.append(...tokenSpan(reader.text(token), label(token), token));
  let current = null;
  const select = (span) => {
    current?.classList.remove('current');
    current = span;
    if (!span) return hideTip();
    span.classList.add('current');
    return showTip(span, tell(Number(span.dataset.token)));
  };
  text.addEventListener('pointerover', (event) => {
    const span = event.target.closest('.token');
    if (span) select(span);
  });
  text.addEventListener('pointerleave', () => select(null));
  text.addEventListener('blur', () => select(null));
  text.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const spans = [...text.querySelectorAll('.token')];
    const next = spans[Math.max(0, Math.min(spans.length - 1, spans.indexOf(current) + by))];
    select(next);
    next?.scrollIntoView({ block: 'nearest' });
  });
  return text;
}

function tokenSpan(text, label, token) {
  const span = el('span', { class: 'token', 'data-token': token }, visible(text).replaceAll('\n', '⏎'));
  if (text === '') span.classList.add('part');
  if (label != null && label >= 0) {
    tint(span, label).classList.add('tinted');
    span.dataset.label = label;
  }
  return text.includes('\n') ? [span, '\n'] : [span];
}

/** What colours stand for: the most frequent labels of a text, each a button that shows only its tokens. */
function legend(text, word, most = 14) {
  const counts = new Map();
  text.querySelectorAll('.tinted').forEach((span) => counts.set(span.dataset.label, (counts.get(span.dataset.label) ?? 0) + 1));
  const sorted = [...counts].sort(([, a], [, b]) => b - a);
  const buttons = sorted.slice(0, most).map(([label, count]) => {
    const button = tint(
      el('button', { type: 'button', class: 'chip tinted', 'aria-pressed': 'false' }, `${word} ${label}`, el('span', { class: 'count' }, number(count))),
      Number(label),
    );
    button.addEventListener('click', () => {
      const only = button.getAttribute('aria-pressed') === 'false';
      buttons.forEach((one) => one.setAttribute('aria-pressed', String(one === button && only)));
      text.classList.toggle('isolated', only);
      text.querySelectorAll('.token').forEach((span) => span.classList.toggle('kept', only && span.dataset.label === label));
    });
    return button;
  });
  const rest = sorted.length - buttons.length;
  return el('div', { class: 'legend', role: 'group', 'aria-label': 'Colours' }, buttons, rest > 0 ? el('span', { class: 'small' }, `and ${number(rest)} more`) : null);
}

/** Rows of experts with their weights, for a tip. */
function expertRows(experts) {
  const most = Math.max(...experts.map(([, weight]) => weight), 1e-9);
  return el(
    'div',
    { class: 'tip-experts' },
    experts.map(([expert, weight]) => [tint(el('span', { class: 'chip tinted' }, `expert ${expert}`), expert), bar(weight / most, number(weight, 3))]),
  );
}
