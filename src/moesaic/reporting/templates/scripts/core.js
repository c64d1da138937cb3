// Data, elements, and the controls that views share. Text of the data reaches the page through text nodes only.

const DATA = JSON.parse(document.getElementById('data').textContent);
const VIEWS = [];
const MODELS = DATA.models;
const state = { view: '', layer: 0, shown: MODELS.length > 1 ? [0, 1] : MODELS.map((_, index) => index) };

/** An element; `given` are attributes, and functions are listeners. Children are elements or text. */
function el(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === 'function') element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null));
  return element;
}

/** The same with custom properties, such as {hue: 20} for `--hue: 20`. */
function styled(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(`--${name}`, value);
  return element;
}

const unpacked = new WeakMap();

/** Something that Python packed: {type, shape, data} as {values, shape}, or {json} as what it says. Once per value. */
function unpack(packed) {
  if (!unpacked.has(packed)) unpacked.set(packed, inflate(packed.json ?? packed.data).then((bytes) => decoded(packed, bytes)));
  return unpacked.get(packed);
}

function decoded(packed, bytes) {
  if (packed.json) return JSON.parse(new TextDecoder().decode(bytes));
  const kinds = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };
  const values = new kinds[packed.type](bytes);
  if (packed.scale === 1) return { shape: packed.shape, values };
  const scaled = new Float32Array(values.length);
  for (let index = 0; index < values.length; index++) scaled[index] = values[index] * packed.scale;
  return { shape: packed.shape, values: scaled };
}

async function inflate(base64) {
  const bytes = Uint8Array.fromBase64?.(base64) ?? Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).arrayBuffer();
}

const number = (value, digits = 0) =>
  value == null || Number.isNaN(value)
    ? '–'
    : value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (value, digits = 0) => (value == null || Number.isNaN(value) ? '–' : `${number(100 * value, digits)}%`);
const mean = (values) => {
  const known = values.filter((value) => value != null && !Number.isNaN(value));
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? '' : 's'}`;

/** Characters that cannot be seen, or that turn what stands after them around, as something that can. */
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufff9-\ufffc]/gu, (character) => {
    const code = character.codePointAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16).toUpperCase().padStart(4, '0')}⟩`;
  });
}

/** The same for a chip or a list, where spaces and line ends must show as well. */
const shown = (text) => visible(text).replaceAll('\n', '⏎').replaceAll('\t', '⇥').replaceAll(' ', '·') || '∅';

/** A hue for cluster or expert `index`: neighbours differ, in lightness too. */
function tint(element, index) {
  return styled(element, { hue: ((index * 137.508 + 250) % 360).toFixed(1), step: [0, 1, -1][index % 3] });
}

function clear(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child != null));
  return element;
}

/** Heading of a view and what it shows, in plain words. */
function heading(title, ...words) {
  return el('div', { class: 'heading' }, el('h1', {}, title), ...words.map((text) => el('p', { class: 'lede' }, text)));
}

function panel(title, words, ...children) {
  return el('section', { class: 'panel' }, title ? el('h2', {}, title) : null, words ? el('p', { class: 'words' }, words) : null, ...children);
}

/** The shown models one beside the other; `build` gets a model and returns what stands in its pane. */
function pair(build) {
  const panes = state.shown.map((index) => {
    const model = MODELS[index];
    const name = MODELS.length > 1 ? el('h2', { class: 'pane-name' }, el('span', { class: `series s${index % 8}` }), model.name) : null;
    return el('section', { class: 'pane', 'aria-label': model.name }, name, build(model, index));
  });
  return el('div', { class: `pair n${panes.length}` }, panes);
}

function choice(label, options, value, change) {
  const select = el(
    'select',
    { change: () => change(select.value) },
    options.map(([key, text]) => el('option', { value: key, selected: String(key) === String(value) }, text)),
  );
  return el('label', { class: 'control' }, el('span', {}, label), select);
}

function check(label, value, change) {
  const box = el('input', { type: 'checkbox', checked: value, change: () => change(box.checked) });
  return el('label', { class: 'control check' }, box, el('span', {}, label));
}

/** Which colour is whose, for the charts below. */
function key(names) {
  return el('div', { class: 'key-line' }, names.map(([name, index]) => el('span', {}, el('span', { class: `series s${index % 8}` }), visible(name))));
}

const modelKey = () => (state.shown.length > 1 ? key(state.shown.map((index) => [MODELS[index].name, index])) : null);

function controls(...children) {
  return el('div', { class: 'controls' }, ...children);
}

/** A slider over the MoE layers of the shown models. `state.layer` counts MoE layers; people see the model's own index. */
function layerSlider(change) {
  const longest = state.shown.map((index) => MODELS[index].model.layers).reduce((a, b) => (b.length > a.length ? b : a), []);
  state.layer = Math.min(state.layer, longest.length - 1);
  const says = el('output', {});
  const slider = el('input', {
    type: 'range',
    class: 'layer-slider',
    min: 0,
    max: Math.max(0, longest.length - 1),
    value: state.layer,
    input: () => {
      state.layer = Number(slider.value);
      show();
      change();
    },
  });
  const show = () => {
    says.textContent = `${longest[state.layer]} (${state.layer + 1} of ${longest.length})`;
    slider.setAttribute('aria-valuetext', `layer ${longest[state.layer]}`);
  };
  show();
  return el('label', { class: 'control slider' }, el('span', {}, 'Layer'), slider, says);
}

const layerOf = (model) => Math.min(state.layer, model.model.layers.length - 1);

/** A bar of `share` (0 to 1) with its text on it. */
function bar(share, text, kind = '') {
  return styled(el('span', { class: `bar ${kind}` }, el('span', { class: 'fill' }), el('span', { class: 'says' }, text)), {
    share: Math.max(0, Math.min(1, share || 0)),
  });
}

function table(columns, rows, given = {}) {
  const head = el('tr', {}, columns.map((name) => el('th', { scope: 'col' }, name)));
  const body = rows.map((row) =>
    el('tr', {}, row.map((cell, index) => (index === 0 ? el('th', { scope: 'row' }, cell) : el('td', {}, cell ?? '–')))),
  );
  return el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': given.label ?? 'Table' }, el('table', given, el('thead', {}, head), el('tbody', {}, body)));
}

const LEVELS = { healthy: '●', skewed: '▲', collapsed: '■' };
const badge = (level) => el('span', { class: `badge ${level}` }, el('span', { 'aria-hidden': 'true' }, LEVELS[level]), level);
