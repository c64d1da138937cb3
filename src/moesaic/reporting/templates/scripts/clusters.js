// Token clusters (EMO, section 5.3): tokens that take the same ways through the experts.

const clusterView = { chosen: new Map(), colour: 'this' };
const DOCUMENTS_AT_ONCE = 8;

VIEWS.push({
  id: 'clusters',
  title: 'Clusters',
  wanted: () => MODELS.some((model) => model.clusters || model.why_no_clusters),
  render: () => {
    const body = el('div', { class: 'stack' });
    const fill = () => clear(body, pair(clusterPane));
    fill();
    return [
      heading(
        'Token clusters',
        'Tokens that are routed alike through all layers form a cluster. If experts specialise on subjects, a cluster holds tokens of one subject ' +
          'and most of a document lies in one cluster; if they specialise on forms, clusters hold things like articles, names or punctuation, and every document is scattered.',
      ),
      controls(
        choice('Colour in the texts', [['this', 'only this cluster'], ['all', 'every cluster']], clusterView.colour, (value) => {
          clusterView.colour = value;
          fill();
        }),
      ),
      body,
    ];
  },
  step: (by) => {
    for (const index of state.shown) {
      const count = MODELS[index].clusters?.sizes.length ?? 0;
      if (count) clusterView.chosen.set(index, (clusterOf(index) + by + count) % count);
    }
    draw();
  },
});

const clusterOf = (index) => clusterView.chosen.get(index) ?? 0;

function clusterPane(model, index) {
  const { clusters } = model;
  if (!clusters) return el('p', { class: 'panel words' }, model.why_no_clusters);
  const facts = [
    ['Purity', percent(clusters.purity), 'share of tokens in the domain that rules their cluster'],
    ['Mutual information', number(clusters.nmi, 3), 'with the domains: 0 is none, 1 is all'],
    ['Silhouette', number(clusters.silhouette, 3), `how far apart clusters are, on ${plural(clusters.silhouette_tokens, 'token')}`],
    ['Concentration', percent(clusters.concentration), `of a document in its main cluster; ${percent(clusters.concentration_by_chance)} by chance`],
  ];
  const list = el('div', { class: 'cluster-list', role: 'group', 'aria-label': `Clusters of ${model.name}` });
  const detail = el('div', { class: 'cluster-detail' });
  Promise.all([unpack(clusters.list), readerOf(model)]).then(([all, reader]) => {
    const buttons = all.map((cluster, place) => clusterButton(model, cluster, place, () => select(place)));
    const select = (chosen) => {
      clusterView.chosen.set(index, chosen);
      buttons.forEach((button, place) => button.setAttribute('aria-pressed', String(place === chosen)));
      clear(detail, clusterDetail(model, all, reader, chosen));
    };
    clear(list, buttons);
    select(clusterOf(index));
  });
  return [
    el('dl', { class: 'facts wide' }, facts.map(([name, value, words]) => el('div', {}, el('dt', {}, name), el('dd', {}, value), el('dd', { class: 'small' }, words)))),
    el('div', { class: 'explorer' }, list, detail),
  ];
}

function topDomain(model, cluster) {
  const best = cluster.domains.indexOf(Math.max(...cluster.domains));
  return model.data.domains[best].name;
}

function clusterButton(model, cluster, index, select) {
  const largest = Math.max(...model.clusters.sizes);
  return el(
    'button',
    { type: 'button', class: 'cluster', click: select },
    tint(el('span', { class: 'chip tinted' }, String(index)), index),
    el(
      'span',
      { class: 'cluster-words' },
      el('strong', {}, `${visible(topDomain(model, cluster))} `, el('span', { class: 'small' }, percent(cluster.purity))),
      el('span', { class: 'small strings' }, cluster.frequent.slice(0, 5).map(({ name }) => shown(name)).join('  ')),
    ),
    bar(cluster.tokens / largest, number(cluster.tokens)),
  );
}

function clusterDetail(model, all, reader, index) {
  const cluster = all[index];
  const near = model.clusters.cosine[index]
    .map((value, other) => [value, other])
    .filter(([, other]) => other !== index)
    .sort(([a], [b]) => b - a)
    .slice(0, 4);
  return [
    el('h3', {}, `Cluster ${index} `, el('span', { class: 'small' }, `${plural(cluster.tokens, 'token')}, ${percent(cluster.tokens / model.data.tokens, 1)} of all`)),
    domainBars(model, cluster.domains.map((count) => count / Math.max(1, cluster.tokens))),
    el('h4', {}, 'Typical strings'),
    chips(cluster.frequent, (share) => `${percent(share)} of all its occurrences are in this cluster`),
    el('h4', {}, 'Nearest to the centre'),
    el(
      'ul',
      { class: 'contexts' },
      cluster.nearest.slice(0, 8).map((token) =>
        el('li', { dir: 'auto' }, el('span', {}, visible(token.before)), tint(el('mark', { class: 'tinted' }, shown(token.text)), index), el('span', {}, visible(token.after)), el('span', { class: 'small' }, ` ${number(token.similarity, 3)}`)),
      ),
    ),
    near.length ? el('p', { class: 'small' }, 'Nearest clusters: ', near.map(([value, other]) => [tint(el('span', { class: 'chip tinted' }, String(other)), other), ` ${number(value, 2)}  `])) : null,
    el('h4', {}, 'Where it goes'),
    clusterHeat(model, index),
    el('h4', {}, 'Documents with most of it'),
    rankedDocuments(model, reader, cluster.documents, index),
  ];
}

/** Shares of the domains as bars. */
function domainBars(model, shares) {
  const rows = shares.map((share, index) => [share, model.data.domains[index].name]).sort(([a], [b]) => b - a);
  return el('div', { class: 'domain-bars' }, rows.slice(0, 8).map(([share, name]) => [el('span', {}, visible(name)), bar(share, percent(share))]));
}

function chips(strings, words) {
  return el('div', { class: 'chips' }, strings.map(({ name, count, share }) => el('span', { class: 'chip', title: `${plural(count, 'token')}; ${words(share)}` }, shown(name), el('span', { class: 'count' }, percent(share)))));
}

function clusterHeat(model, index) {
  const { layers, num_experts: experts } = model.model;
  const rows = async () => {
    const { values } = await unpack(model.clusters.mass);
    return layers.map((_, layer) => Array.from(values.slice((index * layers.length + layer) * experts, (index * layers.length + layer + 1) * experts)));
  };
  return chart(
    `Mean probabilities of cluster ${index}, layers by experts`,
    Math.max(150, Math.min(360, 70 + layers.length * 8)),
    async () => ({
      traces: [
        {
          type: 'heatmap',
          z: await rows(),
          zmin: 0,
          colorscale: scale.sequential(),
          hovertemplate: 'layer %{y}, expert %{x}<br>mean probability %{z:.3f}<extra></extra>',
          colorbar: { thickness: 8, outlinewidth: 0, nticks: 3 },
        },
      ],
      layout: {
        margin: { l: 36, r: 0, t: 4, b: 34 },
        xaxis: { title: { text: 'Expert' }, showgrid: false, zeroline: false },
        yaxis: { autorange: 'reversed', showgrid: false, zeroline: false, ...everyNth(layers) },
      },
    }),
    async () => ({ columns: ['Layer', ...Array.from({ length: experts }, (_, expert) => `Expert ${expert}`)], rows: (await rows()).map((row, layer) => [String(layers[layer]), ...row.map((value) => number(value, 3))]) }),
  );
}

/** Ranked documents, a few at a time. */
function rankedDocuments(model, reader, ranked, index) {
  const holder = el('div');
  const more = el('button', { type: 'button', class: 'more' });
  let next = 0;
  const load = () => {
    for (const { document, share } of ranked.slice(next, next + DOCUMENTS_AT_ONCE)) holder.append(documentCard(model, reader, document, share, index));
    next = Math.min(ranked.length, next + DOCUMENTS_AT_ONCE);
    more.textContent = `Load more (${next} of ${ranked.length})`;
    more.hidden = next >= ranked.length;
  };
  more.addEventListener('click', load);
  load();
  return [holder, more];
}

function documentCard(model, reader, document, share, index) {
  const facts = reader.documents[document];
  const span = reader.span(document);
  const head = el(
    'header',
    {},
    el('strong', {}, percent(share)),
    el('span', {}, ` ${visible(model.data.domains[facts.domain].name)}`),
    el('span', { class: 'small' }, ` ${visible(facts.source)}`),
    span ? readButton(model, document, facts) : null,
  );
  const text = span
    ? tokenText(reader, span, {
        name: `Document ${visible(facts.source)}`,
        label: (token) => (clusterView.colour === 'all' || reader.cluster(token) === index ? reader.cluster(token) : null),
        tell: (token) => [el('strong', {}, shown(reader.text(token))), ` cluster ${reader.cluster(token)}`],
      })
    : el('p', { dir: 'auto' }, `${visible(facts.opening)}…`, el('span', { class: 'small' }, ' (opening only: not among the texts to read)'));
  return el('article', { class: 'document' }, head, text);
}
