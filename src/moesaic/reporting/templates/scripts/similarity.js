// How alike the domains are to the routers (EMO, section 5.3 and figure 6).

const similarityView = { all: true, stretch: false };

VIEWS.push({
  id: 'similarity',
  title: 'Domains',
  wanted: () => MODELS.some((model) => model.data.domains.length > 1),
  render: () => {
    const body = el('div', { class: 'stack' });
    const fill = () => clear(body, pair(similarityPane));
    const slider = layerSlider(() => {
      similarityView.all = false;
      box.querySelector('input').checked = false;
      fill();
    });
    const box = check('All layers at once', similarityView.all, (value) => {
      similarityView.all = value;
      fill();
    });
    fill();
    return [
      heading(
        'Domain similarity',
        'Two domains are similar (1) when their texts use the same experts equally often, and different (0) when they share none. ' +
          'In an ordinary mixture all domains look alike; where experts specialise on what texts are about, related domains stay close and others drift apart, most of all in later layers.',
      ),
      controls(
        slider,
        box,
        check('Colours over the range of the values only', similarityView.stretch, (value) => {
          similarityView.stretch = value;
          fill();
        }),
      ),
      body,
      panel('Through the layers', 'Mean similarity of two different domains, layer by layer. Lower: the experts tell the domains apart.', modelKey(), similarityLines()),
    ];
  },
});

/** The matrix of the chosen layer, or over all layers. */
async function similarityMatrix(model) {
  if (similarityView.all) return model.similarity.all;
  const { values, shape } = await unpack(model.similarity.layers);
  const count = shape[1];
  const start = layerOf(model) * count * count;
  return Array.from({ length: count }, (_, row) => Array.from(values.slice(start + row * count, start + (row + 1) * count)));
}

/** The values in their cells. */
function valuesOn(matrix, low) {
  const shade = colours(scale.sequential());
  return matrix.flatMap((row, y) =>
    row.map((value, x) => ({ x, y, text: number(value, 2), showarrow: false, font: { color: inkOn(shade((value - low) / (1 - low))) } })),
  );
}

/** The lowest value of the shown matrices: one scale for both models. */
async function lowestSimilarity() {
  const matrices = await Promise.all(state.shown.map((index) => similarityMatrix(MODELS[index])));
  return Math.min(0.99, ...matrices.flat(2));
}

function similarityPane(model) {
  const names = model.data.domains.map((domain) => domain.name);
  if (names.length < 2) return el('p', { class: 'words' }, 'This model was inspected with one domain.');
  const where = similarityView.all ? 'all layers' : `layer ${model.model.layers[layerOf(model)]}`;
  const height = Math.max(300, Math.min(580, 110 + names.length * 40));
  const heat = chart(
    `Domain similarity of ${model.name}, ${where}`,
    height,
    async () => {
      const matrix = await similarityMatrix(model);
      const low = similarityView.stretch ? await lowestSimilarity() : 0;
      const few = names.length <= 12;
      return {
        traces: [
          {
            type: 'heatmap',
            z: matrix,
            customdata: matrix.map((row, y) => row.map((_, x) => [plotText(names[y]), plotText(names[x])])),
            zmin: low,
            zmax: 1,
            colorscale: scale.sequential(),
            xgap: 2,
            ygap: 2,
            hovertemplate: '%{customdata[0]} and %{customdata[1]}: %{z:.3f}<extra></extra>',
            colorbar: { thickness: 10, outlinewidth: 0, nticks: 4, len: Math.min(1, 200 / height) },
          },
        ],
        layout: {
          margin: { l: 60, r: 0, t: 8, b: 60 },
          annotations: few ? valuesOn(matrix, low) : [],
          xaxis: { ...named(names), automargin: true, showgrid: false, zeroline: false },
          yaxis: { ...named(names), automargin: true, autorange: 'reversed', showgrid: false, zeroline: false },
        },
      };
    },
    async () => ({ columns: ['Domain', ...names], rows: (await similarityMatrix(model)).map((row, index) => [names[index], ...row.map((value) => number(value, 3))]) }),
  );
  return el('div', { class: 'panel' }, el('p', { class: 'words' }, `In ${where}, over ${plural(model.data.documents, 'document')}.`), heat);
}

/** Mean over the pairs of different domains. */
const apart = (matrix) => mean(matrix.flatMap((row, y) => row.filter((_, x) => x !== y)));

function similarityLines() {
  const holder = el('div');
  Promise.all(state.shown.map((index) => unpack(MODELS[index].similarity.layers))).then((all) => {
    const series = all
      .map(({ values, shape }, place) => {
        const index = state.shown[place];
        const [layers, count] = shape;
        const y = Array.from({ length: layers }, (_, layer) => {
          const start = layer * count * count;
          return apart(Array.from({ length: count }, (_, row) => Array.from(values.slice(start + row * count, start + (row + 1) * count))));
        });
        return { name: MODELS[index].name, x: MODELS[index].model.layers, y, index, markers: true };
      })
      .filter(({ y }) => y.some((value) => value != null));
    holder.append(lineChart('Mean domain similarity by layer', 280, { xTitle: 'Layer', yTitle: 'Similarity', series, x: whole(series.flatMap(({ x }) => x)), y: { range: [0, 1.02] } }));
  });
  return holder;
}
