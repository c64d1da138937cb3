// Read documents, with the routing of every token.

const readerView = { document: null, domain: '', colour: 'cluster', numbers: false };

VIEWS.push({
  id: 'reader',
  title: 'Reader',
  wanted: () => MODELS.some((model) => model.reader.documents.length > 0),
  render: () => {
    const first = MODELS[state.shown[0]];
    if (!first.clusters && readerView.colour === 'cluster') readerView.colour = 'expert';
    const body = el('div', { class: 'stack' });
    const picker = el('div', { class: 'controls' });
    const fill = () => {
      fillPicker(picker, first, fill);
      clear(body, pair(readerPane));
    };
    const change = (name) => (value) => {
      readerView[name] = value;
      fill();
    };
    unpack(first.documents).then((documents) => {
      readerView.documents = documents;
      fill();
    });
    return [
      heading(
        'Reader',
        'Every token is coloured by the cluster it belongs to, or by the expert that a layer gives most weight to. Point at a token, or press the arrow keys in a text, ' +
          'to see its experts and their weights. ' +
          readerWords(first),
      ),
      controls(
        choice('Colour by', [['cluster', 'cluster'], ['expert', 'expert of the layer']], readerView.colour, change('colour')),
        layerSlider(fill),
        check('Numbers', readerView.numbers, change('numbers')),
      ),
      picker,
      body,
    ];
  },
  step: (by) => {
    const listed = listedDocuments(MODELS[state.shown[0]]);
    const next = (listed.indexOf(readerView.document) + by + listed.length) % listed.length;
    readDocument(listed[next]);
  },
});

function readerWords(model) {
  return (
    `Texts are a sample: ${number(model.reader.tokens)} tokens of the ${number(model.data.tokens)} that all other views are about` +
    (model.reader.layers.length < model.model.layers.length ? `, with ${model.reader.layers.length} of the ${model.model.layers.length} layers.` : '.')
  );
}

function readDocument(document) {
  readerView.document = document;
  const facts = readerView.documents?.[document];
  if (readerView.domain !== '' && facts && String(facts.domain) !== readerView.domain) readerView.domain = '';
  open('reader');
}

/** Documents of the chosen domain that can be read, in the order of the sample. */
function listedDocuments(model) {
  const all = model.reader.documents;
  if (readerView.domain === '' || !readerView.documents) return all;
  return all.filter((document) => String(readerView.documents[document].domain) === readerView.domain);
}

function fillPicker(picker, model, fill) {
  const listed = listedDocuments(model);
  if (!listed.includes(readerView.document)) readerView.document = listed[0];
  const names = model.data.domains.map((domain, index) => [String(index), domain.name]);
  const held = names.filter(([index]) => model.reader.documents.some((document) => String(readerView.documents[document].domain) === index));
  const choose = (document) => {
    readerView.document = document;
    fill();
  };
  const place = listed.indexOf(readerView.document);
  clear(
    picker,
    choice('Domain', [['', 'all'], ...held], readerView.domain, (value) => {
      readerView.domain = value;
      fill();
    }),
    choice('Document', listed.map((document) => [document, title(readerView.documents[document])]), readerView.document, (value) => choose(Number(value))),
    el('button', { type: 'button', 'aria-label': 'Previous document', disabled: place === 0, click: () => choose(listed[place - 1]) }, '‹'),
    el('button', { type: 'button', 'aria-label': 'Next document', disabled: place === listed.length - 1, click: () => choose(listed[place + 1]) }, '›'),
    el('span', { class: 'small' }, `${number(place + 1)} of ${number(listed.length)}`),
  );
}

/** Opens a document of `model`: beside the first model if that has the same text to read, else alone. */
function readButton(model, document, facts) {
  const read = async () => {
    const first = MODELS[state.shown[0]];
    const found = await findDocument(first, facts);
    if (found == null) {
      state.shown = [MODELS.indexOf(model)];
      drawModels();
    }
    readDocument(found ?? document);
  };
  return el('button', { type: 'button', class: 'link', click: read }, 'Read');
}

/** The reader's document of `model` with the same text; undefined if there is none. */
async function findDocument(model, { source, opening }) {
  const documents = await unpack(model.documents);
  return model.reader.documents.find((document) => documents[document].source === source && documents[document].opening === opening);
}

const title = (facts) => visible(facts.opening).replace(/\s+/g, ' ').slice(0, 60) || facts.source;

function readerPane(model) {
  const holder = el('div', { class: 'panel reader' });
  fillReader(holder, model);
  return holder;
}

async function fillReader(holder, model) {
  const reader = await readerOf(model);
  const isFirst = model === MODELS[state.shown[0]];
  const document = isFirst ? readerView.document : await findDocument(model, readerView.documents[readerView.document]);
  if (document == null) return clear(holder, el('p', { class: 'words' }, 'This document is not among the texts that can be read for this model.'));
  const place = readerLayer(model, layerOf(model));
  const routing = await routingOf(model, place);
  const layer = model.model.layers[model.reader.layers[place]];
  const facts = reader.documents[document];
  const span = reader.span(document);
  const byCluster = readerView.colour === 'cluster' && model.clusters;
  const text = tokenText(reader, span, {
    name: `Text, ${visible(facts.source)}`,
    numbers: readerView.numbers,
    label: byCluster ? reader.cluster : (token) => routing(token)[0][0],
    tell: (token) => [
      el('div', {}, el('strong', {}, shown(reader.text(token))), ` token ${number(token - span[0] + 1)}`),
      model.clusters ? el('div', {}, 'cluster ', tint(el('span', { class: 'chip tinted' }, String(reader.cluster(token))), reader.cluster(token))) : null,
      el('div', { class: 'small' }, `layer ${layer}`),
      expertRows(routing(token)),
    ],
  });
  return clear(
    holder,
    documentFacts(model, facts, layer),
    legend(text, byCluster ? 'cluster' : 'expert'),
    text,
    ribbon(model, span),
  );
}

function documentFacts(model, facts, layer) {
  const parts = [
    visible(model.data.domains[facts.domain].name),
    plural(facts.tokens, 'token'),
    model.clusters ? `main cluster ${facts.cluster} with ${percent(facts.concentration)} of them` : null,
    readerView.colour === 'expert' ? `coloured by the first expert of layer ${layer}` : null,
  ];
  return el('p', { class: 'small' }, parts.filter(Boolean).join(' · '), el('br'), visible(facts.source));
}

/** All of the reader's layers as rows, tokens as columns, coloured by the first expert: how steady the routing is. */
function ribbon(model, [start, end]) {
  const canvas = el('canvas', { width: end - start, height: model.reader.layers.length, role: 'img', 'aria-label': 'First expert of every token in every layer' });
  Promise.all(model.reader.routing.map(({ ids }) => unpack(ids))).then((layers) => {
    const context = canvas.getContext('2d');
    layers.forEach(({ values, shape: [, active] }, row) => {
      for (let token = start; token < end; token++) {
        context.fillStyle = tintColour(values[token * active]);
        context.fillRect(token - start, row, 1, 1);
      }
    });
  });
  return el(
    'figure',
    { class: 'ribbon' },
    el('figcaption', { class: 'small' }, 'The whole text at once: a row for each layer from the first (above) to the last, a column for each token, the colour its first expert. Long stripes: the text stays with its experts.'),
    canvas,
  );
}

const tints = new Map();

/** The colour of `tint(index)` as a canvas wants it. */
function tintColour(index) {
  const key = `${colour('ink')} ${index}`;
  if (!tints.has(key)) {
    const swatch = tint(el('span', { class: 'tinted', hidden: true }), index);
    document.body.append(swatch);
    tints.set(key, getComputedStyle(swatch).backgroundColor);
    swatch.remove();
  }
  return tints.get(key);
}
