// How routing changes from the beginning of a document to its end, and the first token (EMO, appendix D).

const CURVES = {
  to_document: ['Likeness to the whole document', 'Cosine between the routing of a token and the mean of its document. High from early on: the model commits itself to the document’s experts.'],
  to_previous: ['Likeness to the token before', 'Cosine between the routing of neighbours. High: experts are kept from token to token.'],
  confidence: ['Confidence', "Mean of the router's largest probability."],
  entropy: ['Evenness of the load', 'Entropy of the experts’ load at this place in the documents: 1 is even.'],
};
const positionView = { layers: 'mean' };

VIEWS.push({
  id: 'position',
  title: 'Along a document',
  wanted: () => MODELS.length > 0,
  render: () => {
    const body = el('div', { class: 'stack' });
    const fill = () => clear(body, positionCharts());
    const slider = layerSlider(() => positionView.layers === 'one' && fill());
    fill();
    return [
      heading(
        'Along a document',
        'The first token has nothing before it, so its routing cannot know what the document is about. These curves show how quickly that changes, ' +
          'averaged over all documents at the same place.',
      ),
      pair(firstToken),
      controls(
        choice('Layers', [['mean', 'mean over all'], ['one', 'the one of the slider']], positionView.layers, (value) => {
          positionView.layers = value;
          fill();
        }),
        slider,
      ),
      modelKey(),
      body,
      panel('The first token, layer by layer', 'Cosine between the mean routing of first tokens and that of all other tokens. Low: the layer treats a first token as something of its own.', firstTokenLines()),
    ];
  },
});

function firstToken(model) {
  const facts = model.position.first_token;
  const rows =
    facts.cluster == null
      ? []
      : [
          [`first tokens in cluster ${facts.cluster}`, facts.first_in_cluster],
          ['second tokens in it', facts.second_in_cluster],
          ['first tokens among its tokens', facts.cluster_is_first],
        ];
  return el('div', { class: 'panel' }, el('p', { class: 'verdict' }, facts.sentence), el('div', { class: 'domain-bars' }, rows.map(([name, share]) => [el('span', {}, name), bar(share, percent(share))])));
}

function positionCharts() {
  return el('div', { class: 'grid' }, Object.entries(CURVES).map(([key, [title, words]]) => panel(title, words, positionLines(key, title))));
}

function positionLines(key, title) {
  const series = state.shown.map((index) => {
    const { position } = MODELS[index];
    const rows = position[key];
    const y = rows.map((row) => (positionView.layers === 'mean' ? mean(row) : row[layerOf(MODELS[index])]));
    return { name: MODELS[index].name, x: position.start, y, index, markers: true };
  });
  return lineChart(title, 260, { xTitle: 'Position', series });
}

function firstTokenLines() {
  const series = state.shown.map((index) => ({ name: MODELS[index].name, x: MODELS[index].model.layers, y: MODELS[index].position.first_token.cosine_to_rest, index, markers: true }));
  return lineChart('First token against the others, by layer', 260, { xTitle: 'Layer', yTitle: 'Cosine', series, x: whole(series.flatMap(({ x }) => x)) });
}
