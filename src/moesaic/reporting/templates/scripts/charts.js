// Plotly, run from this file's own copy when the first chart is wanted, and charts in the page's colours.

let plotly = null;

function loadPlotly() {
  plotly ??= inflate(document.getElementById('plotly').textContent).then((bytes) => {
    const script = document.createElement('script');
    script.textContent = new TextDecoder().decode(bytes);
    document.head.append(script);
    return window.Plotly;
  });
  return plotly;
}

/** Plotly reads a little markup in texts: what comes from the data must stay as it is. */
const plotText = (text) => shown(text).replaceAll('·', ' ').replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');

const probe = el('span', { hidden: true });
document.body.append(probe);

/** A colour of the style sheet as it is in the present theme. */
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const SERIES = 8;
const DASHES = ['solid', 'dash', 'dot', 'dashdot'];

/** Line style of series `index`; beyond the eight colours the dashes differ. */
const line = (index, width = 2) => ({ color: colour(`series-${index % SERIES}`), width, dash: DASHES[Math.floor(index / SERIES) % DASHES.length] });

const scale = {
  sequential: () => [0, 1, 2, 3, 4].map((step) => [step / 4, colour(`seq-${step}`)]),
  diverging: () => [0, 1, 2, 3, 4].map((step) => [step / 4, colour(`div-${step}`)]),
};

const channels = (text) => text.match(/[\d.]+/g).map(Number);

/** The colours of a scale as a function of a share from 0 to 1, as [red, green, blue]. */
function colours(stops) {
  const known = stops.map(([, text]) => channels(text));
  return (share) => {
    const place = Math.max(0, Math.min(1, share)) * (known.length - 1);
    const low = Math.min(known.length - 2, Math.floor(place));
    return known[low].slice(0, 3).map((value, channel) => value + (known[low + 1][channel] - value) * (place - low));
  };
}

/** Black or white, whichever is read better on a colour (relative luminance, WCAG). */
function inkOn(rgb) {
  const [red, green, blue] = rgb.map((value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? '#000' : '#fff';
}

/**
 * A chart with a name for screen readers and its numbers as a table to open.
 * `numbers` is a function that gives {columns, rows}.
 */
function chart(label, height, draw, numbers) {
  const plot = styled(el('div', { class: 'plot', role: 'img', 'aria-label': label }), { height: `${height}px` });
  const figure = el('figure', { class: 'chart' }, plot, numbers ? numbersOf(label, numbers) : null);
  loadPlotly().then(async (library) => {
    if (!plot.isConnected) return;
    const { traces, layout = {} } = await draw();
    await library.newPlot(plot, traces, themed(layout, height), { displayModeBar: false, responsive: true, showTips: false });
    plot.classList.add('drawn');
  });
  return figure;
}

function themed(layout, height) {
  const axis = { gridcolor: colour('line'), zerolinecolor: colour('line'), linecolor: colour('line'), tickcolor: colour('line') };
  const family = getComputedStyle(document.body).fontFamily;
  const axes = Object.fromEntries(
    Object.entries({ xaxis: {}, yaxis: {}, ...layout })
      .filter(([name]) => /^[xy]axis/.test(name))
      .map(([name, value]) => [name, { ...axis, ...value }]),
  );
  return {
    height,
    margin: { l: 48, r: 12, t: 12, b: 40 },
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family, size: 12, color: colour('ink') },
    hoverlabel: { bgcolor: colour('tip'), bordercolor: colour('tip'), font: { family, color: colour('tip-ink') }, align: 'left' },
    showlegend: false,
    hovermode: 'closest',
    ...layout,
    ...axes,
  };
}

function numbersOf(label, numbers) {
  const details = el('details', { class: 'numbers' }, el('summary', {}, 'Numbers'));
  details.addEventListener(
    'toggle',
    async () => {
      const { columns, rows } = await numbers();
      details.append(table(columns, rows, { label }));
    },
    { once: true },
  );
  return details;
}

/** Lines over x: `series` are {name, x, y, index, error?, markers?}; `format` is a d3 format of y. Names stand in a `key`. */
function lineChart(label, height, { xTitle, yTitle = '', series, format = '.4~g', x = {}, y = {} }) {
  return chart(
    label,
    height,
    () => ({
      traces: series.map(({ name, x, y: values, index, error, markers }) => ({
        type: 'scatter',
        mode: markers ? 'lines+markers' : 'lines',
        name: plotText(name),
        x,
        y: values,
        line: line(index),
        marker: { size: 5 },
        error_y: error ? { type: 'data', array: error, thickness: 1, width: 2 } : undefined,
        hovertemplate: `%{y:${format}}<extra>${plotText(name)}, ${xTitle.toLowerCase()} %{x:,}</extra>`,
      })),
      layout: { margin: { l: 48, r: 12, t: 8, b: 40 }, xaxis: { title: { text: xTitle }, ...x }, yaxis: { automargin: true, title: { text: yTitle }, ...y } },
    }),
    () => ({
      columns: [xTitle, ...series.map(({ name }) => name)],
      rows: everyX(series).map((at) => [number(at), ...series.map(({ x, y: values }) => precise(values[x.indexOf(at)]))]),
    }),
  );
}

/** An axis of whole numbers, such as layers, with at most some 12 ticks. */
function whole(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return { tick0: low, dtick: Math.max(1, Math.ceil((high - low) / 12)), range: [low - 0.3, high + 0.3] };
}

/** An axis for positive values: logarithmic, with ticks at 1, 2, 5 and so on, where they span more than a factor of four. */
function spanning(values) {
  const known = values.filter((value) => value > 0);
  if (!known.length || Math.max(...known) < 4 * Math.min(...known)) return {};
  const ticks = Array.from({ length: 40 }, (_, index) => [1, 2, 5][index % 3] * 10 ** (Math.floor(index / 3) - 3));
  return { type: 'log', tickvals: ticks, ticktext: ticks.map((tick) => tick.toLocaleString('en')) };
}

const everyX = (series) => [...new Set(series.flatMap(({ x }) => x))].sort((a, b) => a - b);
const precise = (value) => (value == null || Number.isNaN(value) ? '–' : Number(value.toPrecision(4)).toLocaleString('en', { maximumSignificantDigits: 4 }));

/** Ticks at whole numbers with the data's own names. */
const named = (names) => ({ tickmode: 'array', tickvals: names.map((_, index) => index), ticktext: names.map(plotText) });
