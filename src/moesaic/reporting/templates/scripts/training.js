// Learning curves of training runs.

const trainingView = { over: 'steps', perplexity: true };

VIEWS.push({
  id: 'training',
  title: 'Training',
  wanted: () => DATA.runs.length > 0,
  render: () => {
    const body = el('div', { class: 'stack' });
    const fill = () => clear(body, trainingCharts());
    fill();
    return [
      heading(
        'Training',
        'Learning curves. The loss is what training makes smaller; held-out perplexity says how well the model predicts texts that it has not seen, domain by domain. ' +
          'The curves of the experts show whether all of them stay in use.',
      ),
      controls(
        choice('Over', [['steps', 'steps'], ['tokens', 'tokens']], trainingView.over, (value) => {
          trainingView.over = value;
          fill();
        }),
        choice('Held-out', [['true', 'perplexity'], ['false', 'loss']], trainingView.perplexity, (value) => {
          trainingView.perplexity = value === 'true';
          fill();
        }),
      ),
      key(DATA.runs.map((run, index) => [run.name, index])),
      body,
      panel('Runs', null, runsTable()),
      DATA.runs.length > 1 ? recipesPanel() : recipePanel(),
    ];
  },
});

const xTitle = () => (trainingView.over === 'steps' ? 'Step' : 'Tokens');

function trainingCharts() {
  const domains = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.validation.domains)))];
  const smoothed = Math.max(...DATA.runs.map((run) => run.mean_over));
  return [
    el(
      'div',
      { class: 'grid' },
      panel('Training loss', `Cross-entropy in nats per token${smoothed > 1 ? `, means over up to ${smoothed} steps` : ''}.`, curves('loss', 'Loss')),
      domains.length ? panel(`${heldOutName()}, all domains`, trainingView.perplexity ? 'Of the mean loss over the domains.' : 'Mean over the domains, in nats per token.', heldOut(null)) : null,
    ),
    domains.length > 1 ? panel(`${heldOutName()}, by domain`, 'Bars are one standard error over documents.', el('div', { class: 'grid small-charts' }, domains.map((domain) => el('div', {}, el('h4', {}, visible(domain)), heldOut(domain))))) : null,
    el(
      'div',
      { class: 'grid' },
      optional('Balance loss', '1 is balanced; before its coefficient.', 'balance_loss'),
      optional('Evenness of the experts', 'Entropy of the load over log E, mean over the layers: 1 is even.', 'load_entropy'),
      optional('Busiest expert', 'Largest share of a layer’s selections that one expert takes.', 'largest_share'),
      optional('Experts without a token', 'In a step, over all layers.', 'dead_experts'),
      optional('Learning rate', null, 'lr'),
      optional('Gradient norm', 'Before clipping.', 'grad_norm'),
      optional('Router z-loss', 'Before its coefficient.', 'router_z_loss'),
      optional('Tokens per second', 'Of whole steps, padding included.', 'tokens_per_second'),
    ),
  ];
}

/** A panel with one curve per run, or nothing where no run has it. */
function optional(title, words, key) {
  return DATA.runs.some((run) => run.curves[key]) ? panel(title, words, curves(key, title)) : null;
}

function curves(key, title) {
  const series = DATA.runs
    .map((run, index) => ({ name: run.name, x: run.at[trainingView.over], y: run.curves[key], index, markers: run.at.steps.length < 30 }))
    .filter(({ y }) => y);
  return lineChart(title, 260, { xTitle: xTitle(), series });
}

const heldOutName = () => `Held-out ${trainingView.perplexity ? 'perplexity' : 'loss'}`;

/** Held-out curves of one domain, or their mean over all. */
function heldOut(domain) {
  const asShown = (loss) => (loss == null ? null : trainingView.perplexity ? Math.exp(loss) : loss);
  const series = DATA.runs
    .map((run, index) => {
      const { validation } = run;
      const x = validation[trainingView.over];
      const all = Object.values(validation.domains);
      const losses = domain === null ? x.map((_, at) => mean(all.map(({ loss }) => loss[at]))) : validation.domains[domain]?.loss;
      const errors = domain === null ? null : validation.domains[domain]?.error.map((error, at) => (error == null ? 0 : trainingView.perplexity ? error * asShown(losses[at]) : error));
      return { name: run.name, x, y: losses?.map(asShown), index, error: errors, markers: true };
    })
    .filter(({ y, x }) => y && x.length);
  return lineChart(`${heldOutName()}, ${domain ?? 'mean over domains'}`, domain === null ? 260 : 200, {
    xTitle: xTitle(),
    series,
    y: trainingView.perplexity ? spanning(series.flatMap(({ y }) => y)) : {},
  });
}

function runsTable() {
  const domains = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.validation.domains)))];
  const last = (values) => (values ? values.at(-1) : null);
  const rows = DATA.runs.map((run, index) => [
    el('span', {}, el('span', { class: `series s${index % 8}` }), run.name),
    number(run.steps),
    number(run.tokens),
    duration(run.seconds),
    precise(last(run.curves.loss)),
    ...domains.map((domain) => {
      const loss = last(run.validation.domains[domain]?.loss);
      return loss == null ? '–' : number(Math.exp(loss), 2);
    }),
    run.curves.load_entropy ? number(last(run.curves.load_entropy), 3) : '–',
    run.curves.dead_experts ? number(last(run.curves.dead_experts), 1) : '–',
  ]);
  const columns = ['Run', 'Steps', 'Tokens', 'Time', 'Last loss', ...domains.map((domain) => `Perplexity on ${visible(domain)}`), 'Load entropy', 'Without a token'];
  return table(columns, rows, { label: 'Runs' });
}

function duration(seconds) {
  if (seconds < 120) return `${number(seconds, 1)} s`;
  return seconds < 7200 ? `${number(seconds / 60, 1)} min` : `${number(seconds / 3600, 1)} h`;
}

function recipesPanel() {
  const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.recipe)))];
  const rows = keys
    .map((key) => [key, ...DATA.runs.map((run) => run.recipe[key] ?? '–')])
    .filter(([, ...values]) => new Set(values).size > 1);
  const words = rows.length ? 'Settings in which the recipes differ; all others are equal.' : 'All settings of the recipes are equal.';
  return panel('Recipes', words, rows.length ? table(['Setting', ...DATA.runs.map((run) => run.name)], rows, { class: 'plain', label: 'Recipes' }) : null);
}

function recipePanel() {
  const rows = Object.entries(DATA.runs[0].recipe);
  return rows.length ? el('details', { class: 'panel' }, el('summary', {}, 'Recipe'), table(['Setting', 'Value'], rows, { class: 'plain', label: 'Recipe' })) : null;
}
