// Expert cards: whom each expert serves.

const expertView = { chosen: new Map() };
const expertOf = (index) => Math.min(expertView.chosen.get(index) ?? 0, MODELS[index].model.num_experts - 1);

VIEWS.push({
  id: 'experts',
  title: 'Experts',
  wanted: () => MODELS.length > 0,
  render: () => {
    const body = el('div', { class: 'stack' });
    const fill = () => clear(body, pair(expertPane));
    fill();
    return [
      heading(
        'Experts',
        'One card for each expert: which domains it serves, which strings and documents it takes most of, and which experts are chosen together with it. ' +
          'Experts have no names: number 3 of one layer has nothing to do with number 3 of another.',
      ),
      controls(layerSlider(fill)),
      body,
    ];
  },
  step: (by) => {
    for (const index of state.shown) {
      const count = MODELS[index].model.num_experts;
      expertView.chosen.set(index, (expertOf(index) + by + count) % count);
    }
    draw();
  },
});

function expertPane(model, index) {
  const grid = el('div', { class: 'expert-grid', role: 'group', 'aria-label': `Experts of ${model.name}` });
  const detail = el('div', { class: 'panel expert' });
  Promise.all([unpack(model.experts), unpack(model.load), unpack(model.documents)]).then(([cards, load, documents]) => {
    const layer = layerOf(model);
    const [scopes, layers, experts] = load.shape;
    const share = (scope, expert) => load.values[(scope * layers + layer) * experts + expert];
    const most = Math.max(...Array.from({ length: experts }, (_, expert) => share(0, expert)));
    const buttons = Array.from({ length: experts }, (_, expert) =>
      el('button', { type: 'button', class: 'expert-button', title: percent(share(0, expert), 2), click: () => select(expert) }, String(expert), bar(most ? share(0, expert) / most : 0, '')),
    );
    const select = (chosen) => {
      expertView.chosen.set(index, chosen);
      buttons.forEach((button, expert) => button.setAttribute('aria-pressed', String(expert === chosen)));
      const shares = Array.from({ length: scopes }, (_, scope) => share(scope, chosen));
      const rank = 1 + Array.from({ length: experts }, (_, expert) => share(0, expert)).filter((value) => value > shares[0]).length;
      clear(detail, expertCard(model, cards[layer * experts + chosen], { chosen, layer: model.model.layers[layer], shares, rank, documents, select }));
    };
    clear(grid, buttons);
    select(expertOf(index));
  });
  return [grid, detail];
}

function expertCard(model, [documents, strings, others], { chosen, layer, shares, rank, documents: known, select }) {
  const even = 1 / model.model.num_experts;
  const title = el('h3', {}, tint(el('span', { class: 'chip tinted' }, String(chosen)), chosen), ` Expert ${chosen} of layer ${layer}`);
  if (!shares[0]) return [title, el('p', { class: 'words' }, 'No token selected it.')];
  return [
    title,
    el('p', { class: 'words' }, `Takes ${percent(shares[0], 2)} of the layer's selections, ${number(shares[0] / even, 2)} times an even share; number ${rank} of ${model.model.num_experts}.`),
    model.data.domains.length > 1 ? [el('h4', {}, 'Share of the selections, domain by domain'), domainLoads(model, shares.slice(1), even)] : null,
    strings.length ? [el('h4', {}, 'Strings that it takes most of'), chips(strings.map(([name, count, share]) => ({ name, count, share })), (share) => `${percent(share)} of all its occurrences select this expert`)] : null,
    others.length ? [el('h4', {}, 'Chosen together with'), coExperts(others, select)] : null,
    documents.length ? [el('h4', {}, 'Documents that it takes most of'), el('ul', { class: 'openings' }, documents.map(([document, share]) => opening(model, known[document], document, share)))] : null,
  ];
}

/** Bars against the largest; the mark is an even share. */
function domainLoads(model, shares, even) {
  const most = Math.max(...shares, even);
  const rows = shares.map((share, index) => [share, model.data.domains[index].name]).sort(([a], [b]) => b - a);
  return el('div', { class: 'domain-bars' }, rows.map(([share, name]) => [el('span', {}, visible(name)), styled(bar(share / most, `${percent(share, 1)}  (${number(share / even, 1)}×)`, 'marked'), { even: even / most })]));
}

function coExperts(others, select) {
  return el(
    'div',
    { class: 'chips' },
    others.map(([expert, share, lift]) =>
      tint(
        el(
          'button',
          { type: 'button', class: 'chip tinted', title: `${percent(share)} of its tokens also select expert ${expert}: ${number(lift, 1)} times as many as by chance`, click: () => select(expert) },
          `expert ${expert}`,
          el('span', { class: 'count' }, `${number(lift, 1)}×`),
        ),
        expert,
      ),
    ),
  );
}

function opening(model, facts, document, share) {
  return el(
    'li',
    {},
    el('span', { class: 'small' }, `${percent(share, 1)} · ${visible(model.data.domains[facts.domain].name)} `),
    model.reader.documents.includes(document) ? readButton(model, document, facts) : null,
    el('span', { class: 'opening', dir: 'auto' }, ` ${visible(facts.opening).replace(/\s+/g, ' ')}`),
  );
}
