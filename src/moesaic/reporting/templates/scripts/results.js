// Results of evaluations: tables, retention against experts kept, gap closure.

const resultsView = { baseline: '', from: 0, to: Math.max(0, DATA.results.length - 1), measure: null };

VIEWS.push({
  id: 'results',
  title: 'Results',
  wanted: () => DATA.results.length > 0,
  render: () => {
    const body = el('div', { class: 'stack' });
    const fill = () => clear(body, suitePanels(), textPanel(), retentionPanel(fill), gapPanel(fill));
    fill();
    return [
      heading(
        'Results',
        'Scores with one standard error; the best of a row is bold. A task that had no data is missing, and an average says over which tasks it is: ' +
          'two averages can be compared when they are over the same.',
      ),
      controls(
        choice('Differences to', [['', 'nothing'], ...DATA.results.map(({ name }, index) => [index, name])], resultsView.baseline, (value) => {
          resultsView.baseline = value === '' ? '' : Number(value);
          fill();
        }),
      ),
      body,
    ];
  },
});

function resultsOverview() {
  return panel('Evaluations', 'Averages of every suite, and held-out text; all tasks are in the view Results.', averagesTable());
}

function averagesTable() {
  const rows = averages().map(({ title, find }) => row(title, find));
  const texts = textTasks().map((task) => row(scoreName(task), (result) => result.tasks[task]));
  const all = [...rows, ...texts];
  return all.length ? table(['Score', ...DATA.results.map(({ name }) => name)], all, { label: 'Averages' }) : el('p', { class: 'words' }, 'These suites have no average.');
}

/** Averages by suite and name, since suites share names; {title, suite, name, find}. A title has the suite where it must. */
function averages() {
  const pairs = new Map(DATA.results.flatMap((result) => result.averages.map(({ suite, name }) => [JSON.stringify([suite, name]), { suite, name }])));
  const all = [...pairs.values()];
  return all.map(({ suite, name }) => ({
    title: all.filter((one) => one.name === name).length > 1 ? `${suite}: ${name}` : name,
    suite,
    name,
    find: (result) => result.averages.find((one) => one.suite === suite && one.name === name),
  }));
}

const textTasks = () => [...new Set(DATA.results.flatMap((result) => Object.entries(result.tasks).filter(([, task]) => task.text).map(([name]) => name)))];

/** What the score of a task is called: that of held-out text is bits per byte, whatever the task's name says. */
const scoreName = (task) => (textTasks().includes(task) ? (task === 'perplexity' ? 'held-out text, bits per byte' : `${task}, bits per byte`) : task);

const scored = (entry) => entry?.score != null;
/** Shares are shown in percent, bits per byte as they are. */
const factor = (entry) => (entry.higher_is_better === false ? 1 : 100);

/** One row of a table: a cell for each result, the best one bold, with the difference to the baseline. */
function row(name, find) {
  const entries = DATA.results.map(find);
  const known = entries.filter(scored);
  const lower = known.some((entry) => entry.higher_is_better === false);
  const best = lower ? Math.min(...known.map(({ score }) => score)) : Math.max(...known.map(({ score }) => score));
  const base = resultsView.baseline === '' ? null : entries[resultsView.baseline];
  return [name, ...entries.map((entry, index) => scoreCell(entry, { best: known.length > 1 && entry?.score === best, base: index === resultsView.baseline ? null : base, index, name }))];
}

function scoreCell(entry, { best, base, index, name }) {
  if (!scored(entry)) {
    const reason = DATA.results[index].missing[name];
    return el('span', { class: 'small', title: reason }, entry || reason ? 'missing' : '–');
  }
  const times = factor(entry);
  const digits = times === 100 ? 1 : 3;
  const error = entry.standard_error == null ? '' : ` ± ${number(times * entry.standard_error, digits)}`;
  const change = scored(base) ? times * (entry.score - base.score) : null;
  const lacking = [...(entry.missing ?? []), ...(entry.partial ?? []), ...(entry.missing_parts ?? [])];
  return el(
    'span',
    {},
    el(best ? 'strong' : 'span', {}, number(times * entry.score, digits)),
    el('span', { class: 'small' }, error),
    change ? el('span', { class: `change ${change > 0 === (times === 100) ? 'up' : 'down'}` }, ` ${change < 0 ? '−' : '+'}${number(Math.abs(change), digits)}`) : null,
    lacking.length ? el('span', { class: 'small', title: `without ${lacking.join(', ')}` }, ' partly') : null,
  );
}

function suitePanels() {
  const names = [...new Set(DATA.results.flatMap((result) => Object.keys(result.suites)))];
  return names.map((name) => {
    const suites = DATA.results.map((result) => result.suites[name]).filter(Boolean);
    const tasks = [...new Set(suites.flatMap((suite) => suite.tasks))];
    const rows = [
      ...tasks.map((task) => {
        const first = DATA.results.map((result) => result.tasks[task]).find(Boolean);
        const how = first ? `${first.metric.replaceAll('_', ' ')}, ${plural(first.shots ?? 0, 'shot')}` : '';
        return [first?.text ? scoreName(task) : task, first?.text ? 'lower is better' : how, ...row(task, (result) => result.tasks[task]).slice(1)];
      }),
      ...averages()
        .filter(({ suite }) => suite === name)
        .map((average) => {
          const first = DATA.results.map(average.find).find(Boolean);
          return [el('strong', {}, average.name), `over ${plural(first.over.length, 'task')}`, ...row(average.name, average.find).slice(1)];
        }),
    ];
    return panel(name, suites[0].about, table(['Task', 'How', ...DATA.results.map((result) => result.name)], rows, { label: name }));
  });
}

/** Held-out text by domain. */
function textPanel() {
  return textTasks().map((task) => {
    const texts = DATA.results.map((result) => result.tasks[task]?.text);
    const domains = [...new Set(texts.filter(Boolean).flatMap((text) => Object.keys(text.domains)))];
    const entry = (text, domain, key) => (domain === null ? text?.all : text?.domains[domain])?.[key];
    const named = (domain) => (domain === null ? el('strong', {}, 'all') : visible(domain));
    const tableOf = (title, key, digits) => {
      const rows = [...domains, null].map((domain) => [named(domain), ...texts.map((text) => number(entry(text, domain, key), digits))]);
      return table([title, ...DATA.results.map(({ name }) => name)], rows, { label: `${title}, ${task}` });
    };
    return panel(
      task === 'perplexity' ? 'Held-out text' : `Held-out text: ${visible(task)}`,
      'Lower is better. Perplexity is per token, so it depends on the tokenizer; bits per byte can be compared between any models.',
      tableOf('Perplexity', 'perplexity', 2),
      tableOf('Bits per byte', 'bits_per_byte', 4),
    );
  });
}

/** What can be plotted: averages, then tasks; {key, name, find, tasks}. An average may have a task's name. */
function measures() {
  const tasks = [...new Set(DATA.results.flatMap((result) => Object.keys(result.tasks)))];
  return [
    ...averages().map(({ title, find }) => ({ key: `average ${title}`, name: title, find, tasks: (result) => find(result)?.over ?? [] })),
    ...tasks.map((name) => ({ key: `task ${name}`, name: scoreName(name), find: (result) => result.tasks[name], tasks: () => [name] })),
  ];
}

const measureOf = () => measures().find(({ key }) => key === resultsView.measure) ?? measures()[0];

function measureChoice(fill) {
  return choice('Score', measures().map(({ key, name }) => [key, name]), measureOf()?.key, (value) => {
    resultsView.measure = value;
    fill();
  });
}

/** Share of experts that a result's score was measured with; null where its tasks differ, or it is dense. */
function keptShare(result, measure) {
  const shares = measure.tasks(result).map((task) => result.tasks[task]?.kept ?? null);
  return new Set(shares).size === 1 ? shares[0] : null;
}

/** Score against the share of experts kept, one line per full model. */
function retentionPanel(fill) {
  const measure = measureOf();
  if (!measure) return null;
  const points = DATA.results
    .map((result) => ({ result, kept: keptShare(result, measure), entry: measure.find(result) }))
    .filter(({ kept, entry }) => kept != null && scored(entry));
  if (new Set(points.map(({ kept }) => kept)).size < 2) return null;
  const groups = Map.groupBy(points, ({ result }) => result.model);
  const series = [...groups.values()].map((group, index) => {
    const sorted = group.sort((a, b) => a.kept - b.kept);
    const full = sorted.find(({ kept }) => kept === 1);
    return {
      name: (full ?? sorted.at(-1)).result.name,
      x: sorted.map(({ kept }) => 100 * kept),
      y: sorted.map(({ entry }) => factor(entry) * entry.score),
      error: sorted.map(({ entry }) => factor(entry) * (entry.standard_error ?? 0)),
      index,
      markers: true,
    };
  });
  return panel(
    'Retention',
    'Score against the share of the routed experts that were used. A flat line: a part of the experts is enough for this task. Bars are one standard error.',
    controls(measureChoice(fill)),
    key(series.map(({ name, index }) => [name, index])),
    lineChart(`Retention, ${measure.name}`, 320, { xTitle: 'Experts kept, %', yTitle: measure.name, series, x: { range: [0, 103] } }),
  );
}

/** How much of the way from one result to another the others have gone. */
function gapPanel(fill) {
  if (DATA.results.length < 3) return null;
  const pick = (key) => (value) => {
    resultsView[key] = Number(value);
    fill();
  };
  const options = DATA.results.map(({ name }, index) => [index, name]);
  const [from, to] = [DATA.results[resultsView.from], DATA.results[resultsView.to]];
  const between = DATA.results.filter((result) => result !== from && result !== to);
  const rows = measures()
    .map(({ name, find }) => {
      const [low, high] = [find(from), find(to)];
      const gap = scored(low) && scored(high) ? high.score - low.score : 0;
      return [name, ...between.map((result) => (gap && scored(find(result)) ? (find(result).score - low.score) / gap : null))];
    })
    .filter(([, ...values]) => values.some((value) => value != null));
  return panel(
    'Gap closure',
    'How far a model has come on the way from one result (0%) to another (100%). Where the two ends are nearly equal, the share says little.',
    controls(choice('From', options, resultsView.from, pick('from')), choice('To', options, resultsView.to, pick('to'))),
    rows.length ? key(between.map((result) => [result.name, DATA.results.indexOf(result)])) : null,
    rows.length ? gapChart(rows, between) : el('p', { class: 'words' }, 'These two have no score in common, or the same ones.'),
  );
}

function gapChart(rows, between) {
  return chart(
    'Gap closure',
    Math.max(180, 70 + rows.length * (14 + 14 * between.length)),
    () => ({
      traces: between.map((result, place) => ({
        type: 'bar',
        orientation: 'h',
        x: rows.map((values) => values[place + 1]),
        y: rows.map((_, index) => index),
        customdata: rows.map(([name]) => plotText(name)),
        marker: { color: line(DATA.results.indexOf(result)).color },
        hovertemplate: `%{customdata}: %{x:.1%}<extra>${plotText(result.name)}</extra>`,
      })),
      layout: {
        margin: { l: 150, r: 16, t: 8, b: 36 },
        bargap: 0.35,
        xaxis: { tickformat: '.0%' },
        yaxis: { ...named(rows.map(([name]) => name)), autorange: 'reversed', showgrid: false },
      },
    }),
    () => ({ columns: ['Score', ...between.map(({ name }) => name)], rows: rows.map(([name, ...values]) => [name, ...values.map((value) => percent(value, 1))]) }),
  );
}
