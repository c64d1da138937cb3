// Overview: verdicts, what the page is made of.

const FACTS = {
  entropy: 'How evenly the tokens are spread over the experts: 1 is even, 0 means that one expert takes all.',
  largest: 'Share of the selections that the busiest expert takes.',
  two: 'Share that the two busiest take together.',
  dead: 'Experts that no token selected.',
  effective: 'Number of equally busy experts that would be as uneven.',
  confidence: "Mean of the router's largest probability.",
};

VIEWS.push({
  id: 'overview',
  title: 'Overview',
  wanted: () => true,
  render: () => [
    heading(DATA.title, overviewWords()),
    MODELS.length ? el('div', { class: 'cards' }, MODELS.map(modelCard)) : null,
    MODELS.length ? healthPanel() : null,
    DATA.runs.length ? panel('Training runs', 'How far each run got. Curves are in the view Training.', runsTable()) : null,
    ...DATA.results.length ? [resultsOverview()] : [],
    madeOf(),
  ],
});

function overviewWords() {
  if (!MODELS.length) return 'Learning curves and results, all in this one file: nothing is loaded from anywhere.';
  return (
    'A mixture-of-experts model sends each token to a few of its experts, in every layer. This page shows to which ones, ' +
    'whether all of them are used, and whether the choice follows what a text is about.'
  );
}

function modelCard(model, index) {
  const { data } = model;
  const facts = [
    ['Architecture', model.model.model_type],
    ['MoE layers', `${model.model.layers.length} of ${model.model.num_layers}`],
    ['Experts', `${model.model.num_experts}, ${model.model.top_k} active${model.model.num_shared_experts ? `, ${model.model.num_shared_experts} shared` : ''}`],
    ['Load entropy', number(mean(model.health.entropy[0]), 3)],
    ['Largest share', percent(Math.max(...model.health.largest[0]), 1)],
    ['Dead experts', number(model.health.dead[0].reduce((sum, value) => sum + value, 0))],
  ];
  if (model.clusters) facts.push(['Document concentration', percent(model.clusters.concentration)], ['Cluster purity', percent(model.clusters.purity)]);
  return el(
    'article',
    { class: 'card' },
    el('h2', {}, el('span', { class: `series s${index % 8}` }), model.name),
    badge(model.verdict.level),
    el('p', { class: 'verdict' }, model.verdict.sentence),
    el('dl', { class: 'facts' }, facts.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value)))),
    el('p', { class: 'small' }, `${plural(data.tokens, 'token')} of ${plural(data.documents, 'document')} in ${plural(data.domains.length, 'domain')}`),
  );
}

function healthPanel() {
  let scope = 0;
  const body = el('div');
  const names = MODELS[state.shown[0]].scopes;
  const fill = () => clear(body, pair((model) => healthTable(model, Math.min(scope, model.scopes.length - 1))));
  fill();
  return panel(
    'Layer by layer',
    'Healthy: the experts share the work. Skewed: some do far more than others. Collapsed: a few do nearly all of it, so the others are wasted.',
    controls(choice('Data', names.map((name, index) => [index, index ? name : 'all domains']), scope, (value) => ((scope = Number(value)), fill()))),
    body,
    el('details', { class: 'rule' }, el('summary', {}, 'The rule behind the verdicts'), el('p', {}, MODELS[state.shown[0]].rule)),
  );
}

function healthTable(model, scope) {
  const { health } = model;
  const grouped = health.coselection[scope].some((value) => value != null);
  const columns = ['Layer', 'Verdict', 'Entropy', 'Largest', 'Top two', 'Dead', 'Effective', 'Confidence', ...(grouped ? ['In one group'] : [])];
  const rows = model.model.layers.map((layer, index) => [
    String(layer),
    badge(health.level[scope][index]),
    bar(health.entropy[scope][index], number(health.entropy[scope][index], 3)),
    bar(health.largest[scope][index], percent(health.largest[scope][index], 1), 'warm'),
    bar(health.two_busiest[scope][index], percent(health.two_busiest[scope][index], 1), 'warm'),
    number(health.dead[scope][index]),
    number(health.effective[scope][index], 1),
    number(health.confidence[scope][index], 3),
    ...(grouped ? [percent(health.coselection[scope][index])] : []),
  ]);
  const made = table(columns, rows, { class: 'health', label: `Health of ${model.name}` });
  const words = [null, null, FACTS.entropy, FACTS.largest, FACTS.two, FACTS.dead, FACTS.effective, FACTS.confidence, 'Share of the pairs a token selects that lie in one group of experts.'];
  made.querySelectorAll('th[scope=col]').forEach((head, index) => words[index] && head.setAttribute('title', words[index]));
  return made;
}

function madeOf() {
  const parts = MODELS.map(partsOf);
  const models = parts.length ? table(['', ...MODELS.map(({ name }) => name)], parts[0].map(([part], row) => [part, ...parts.map((one) => one[row][1])]), { class: 'plain', label: 'Inspections' }) : null;
  const rest = [
    ...DATA.runs.map((run) => [run.name, `${run.folder}, ${plural(run.steps, 'step')}`]),
    ...DATA.results.map((result) => [result.name, result.file]),
  ];
  return panel('What this page is made of', null, models, rest.length ? table(['Input', 'Where it comes from'], rest, { class: 'plain', label: 'Runs and results' }) : null);
}

function partsOf(model) {
  const { data, reader } = model;
  const kept = reader.layers.length;
  const left = kept < model.model.layers.length ? `; ${kept} of ${model.model.layers.length} layers, so that the file stays small` : '';
  return [
    ['Weights', `${model.model.name}${model.model.revision ? ` at ${model.model.revision}` : ''} (sample hash ${model.model.sample_hash.slice(0, 12)})`],
    ['Data', data.sources.map(visible).join(', ')],
    [
      'Statistics',
      `over ${number(data.tokens)} tokens of ${plural(data.documents, 'document')}, drawn from ${plural(data.records, 'record')} by seed ${data.seed}; ` +
        `the first ${number(data.document_tokens)} tokens of each that has ${number(data.min_length)} to ${number(data.max_length)}`,
    ],
    [
      'Texts to read',
      `${number(reader.tokens)} of these tokens: ${plural(reader.sampled, 'document')} drawn by the seed and ` +
        `${number(reader.documents.length - reader.sampled)} that clusters rank highest${left}`,
    ],
    ['Versions', Object.entries(model.versions).map(([name, version]) => `${name} ${version}`).join(', ')],
  ];
}
