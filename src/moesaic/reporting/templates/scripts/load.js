// Expert load: layers x experts, for all the data or one domain.

const MEASURES = {
  even: 'selections, against an even load',
  domain: 'selections, against all the data',
  mass: 'mean probability, against an even one',
};
const loadView = { scope: 0, measure: 'even', order: 'number' };

VIEWS.push({
  id: 'load',
  title: 'Expert load',
  wanted: () => MODELS.length > 0,
  render: () => {
    const body = el('div', { class: 'stack' });
    const fill = () => clear(body, pair(loadPane(fill)));
    const change = (name) => (value) => {
      loadView[name] = name === 'scope' ? Number(value) : value;
      fill();
    };
    fill();
    return [
      heading(
        'Expert load',
        'Each row is a layer, each column an expert, and the colour says how much of the work it does. The middle colour is an equal share; ' +
          'every step up or down is twice or half as much. A good mixture has few extremes over all the data, and clear ones within a domain.',
      ),
      controls(
        choice('Data', MODELS[state.shown[0]].scopes.map((name, index) => [index, index ? name : 'all domains']), loadView.scope, change('scope')),
        choice('Colour', Object.entries(MEASURES), loadView.measure, change('measure')),
        choice('Order', [['number', 'by number'], ['load', 'busiest first, in each layer']], loadView.order, change('order')),
      ),
      body,
    ];
  },
});

const CLIP = 3; // of the colour scale, in powers of two

/** Rows of {share, ratio, expert} per layer of one scope. */
async function loadRows(model, scope, measure, order) {
  const source = await unpack(measure === 'mass' ? model.mass : model.load);
  const [, layers, experts] = source.shape;
  const at = (which, layer, expert) => source.values[(which * layers + layer) * experts + expert];
  return model.model.layers.map((_, layer) => {
    const row = Array.from({ length: experts }, (_, expert) => {
      const share = at(scope, layer, expert);
      return { expert, share, ratio: share / (measure === 'domain' ? at(0, layer, expert) : 1 / experts) };
    });
    return order === 'load' ? row.sort((a, b) => b.share - a.share) : row;
  });
}

const loadPane = (again) => (model) => {
  const scope = Math.min(loadView.scope, model.scopes.length - 1);
  const measure = scope === 0 && loadView.measure === 'domain' ? 'even' : loadView.measure;
  const { order } = loadView;
  const { layers, num_experts: experts } = model.model;
  const name = scope ? model.scopes[scope] : 'all domains';
  const height = Math.max(220, Math.min(580, 90 + layers.length * 20));
  const heat = chart(
    `Expert load of ${model.name}, ${name}`,
    height,
    async () => {
      const rows = await loadRows(model, scope, measure, order);
      const ticks = [-3, -2, -1, 0, 1, 2, 3];
      return {
        traces: [
          {
            type: 'heatmap',
            z: rows.map((row) => row.map(({ ratio }) => (ratio > 0 ? Math.max(-CLIP, Math.min(CLIP, Math.log2(ratio))) : -CLIP))),
            customdata: rows.map((row) => row.map(({ expert, share, ratio }) => [expert, percent(share, 2), ratio > 0 ? `${number(ratio, 2)}×` : share ? '' : 'never'])),
            zmin: -CLIP,
            zmax: CLIP,
            colorscale: scale.diverging(),
            xgap: experts <= 64 ? 1 : 0,
            ygap: layers.length <= 32 ? 1 : 0,
            hovertemplate: 'layer %{y}, expert %{customdata[0]}<br>%{customdata[1]}, %{customdata[2]}<extra></extra>',
            colorbar: { thickness: 10, outlinewidth: 0, tickvals: ticks, ticktext: ['⅛', '¼', '½', '1', '2×', '4×', '8×'], len: Math.min(1, 240 / height) },
          },
        ],
        layout: {
          margin: { l: 44, r: 0, t: 8, b: 40 },
          xaxis: { title: { text: order === 'load' ? 'Experts, busiest first' : 'Expert' }, showgrid: false, zeroline: false },
          yaxis: { title: { text: 'Layer' }, ...named(layers.map(String)), nticks: 16, autorange: 'reversed', showgrid: false, zeroline: false, ...everyNth(layers) },
        },
      };
    },
    async () => ({
      columns: ['Layer', ...Array.from({ length: experts }, (_, index) => (order === 'load' ? `${index + 1}.` : `Expert ${index}`))],
      rows: (await loadRows(model, scope, measure, order)).map((row, index) => [String(layers[index]), ...row.map(({ share }) => percent(share, 2))]),
    }),
  );
  return [el('div', { class: 'panel' }, heat), thumbnails(model, scope, again)];
};

/** At most some 20 ticks on an axis over layers. */
function everyNth(layers) {
  const step = Math.ceil(layers.length / 20);
  const kept = layers.map((layer, index) => [index, String(layer)]).filter(([index]) => index % step === 0);
  return { tickmode: 'array', tickvals: kept.map(([index]) => index), ticktext: kept.map(([, text]) => text) };
}

/** A small picture of every scope, to press. */
function thumbnails(model, scope, again) {
  const buttons = model.scopes.map((name, index) => {
    const { layers, num_experts: experts } = model.model;
    const canvas = el('canvas', { width: experts, height: layers.length });
    paintLoad(canvas, model, index);
    return el(
      'button',
      { type: 'button', class: 'thumb', 'aria-pressed': String(index === scope), click: () => ((loadView.scope = index), again()) },
      canvas,
      el('span', {}, visible(index ? name : 'all domains')),
    );
  });
  return el('div', { class: 'thumbs' }, buttons);
}

async function paintLoad(canvas, model, scope) {
  const rows = await loadRows(model, scope, 'even', 'number');
  const shade = colours(scale.diverging());
  const context = canvas.getContext('2d');
  const image = context.createImageData(canvas.width, canvas.height);
  rows.flat().forEach(({ ratio }, index) => {
    const at = ratio > 0 ? (Math.max(-CLIP, Math.min(CLIP, Math.log2(ratio))) + CLIP) / (2 * CLIP) : 0;
    image.data.set([...shade(at), 255], 4 * index);
  });
  context.putImageData(image, 0, 0);
}
