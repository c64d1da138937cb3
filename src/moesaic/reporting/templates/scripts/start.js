// The frame: views in the sidebar, models to show, theme, keys.

const main = document.getElementById('main');
const views = VIEWS.filter((view) => view.wanted());

const tabs = views.map((view, index) =>
  el(
    'button',
    { type: 'button', role: 'tab', id: `tab-${view.id}`, 'aria-controls': 'main', click: () => open(view.id) },
    el('span', { class: 'key', 'aria-hidden': 'true' }, index < 9 ? String(index + 1) : ''),
    view.title,
  ),
);
const list = document.getElementById('tabs');
list.append(...tabs);

function open(id, { focus = false } = {}) {
  const view = views.find((one) => one.id === id) ?? views[0];
  state.view = view.id;
  if (location.hash !== `#${view.id}`) history.replaceState(null, '', `#${view.id}`);
  tabs.forEach((tab, index) => {
    const current = views[index] === view;
    tab.setAttribute('aria-selected', String(current));
    tab.tabIndex = current ? 0 : -1;
    if (current) main.setAttribute('aria-labelledby', tab.id);
    if (current) tab.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    if (current && focus) tab.focus();
  });
  draw();
  main.scrollTo?.(0, 0);
  window.scrollTo(0, 0);
}

function draw() {
  hideTip();
  const view = views.find((one) => one.id === state.view);
  main.dataset.view = view.id;
  clear(main, view.render());
}

function drawModels() {
  if (MODELS.length < 2) return;
  const options = MODELS.map((model, index) => [index, model.name]);
  const beside = [['', 'none'], ...options];
  const change = (place) => (value) => {
    const next = [...state.shown];
    if (value === '') next.splice(place, 1);
    else next[place] = Number(value);
    state.shown = next.length > 1 && next[0] === next[1] ? [next[0]] : next;
    drawModels();
    draw();
  };
  clear(
    document.getElementById('models'),
    choice('Model', options, state.shown[0], change(0)),
    choice('Beside it', beside, state.shown[1] ?? '', change(1)),
  );
}

// Theme: as the system says, or one of two.
const THEMES = { auto: 'Theme: auto', light: 'Theme: light', dark: 'Theme: dark' };
const themeButton = document.getElementById('theme');
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  themeButton.textContent = THEMES[name];
}
function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  draw();
}
themeButton.addEventListener('click', nextTheme);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);

// Keys.
const help = document.getElementById('help');
document.getElementById('keys').addEventListener('click', () => help.showModal());
document.getElementById('help-close').addEventListener('click', () => help.close());

list.addEventListener('keydown', (event) => {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const now = views.findIndex((view) => view.id === state.view);
  open(views[(now + step + views.length) % views.length].id, { focus: true });
});

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.key === 'Escape') hideTip();
  if (event.target.closest('select, textarea, input:not([type=range]):not([type=checkbox])')) return;
  const action = {
    t: nextTheme,
    '?': () => help.showModal(),
    '[': () => moveLayer(-1),
    ']': () => moveLayer(1),
    j: () => step(1),
    k: () => step(-1),
  }[event.key];
  if (action) action();
  else if (/^[1-9]$/.test(event.key) && views[event.key - 1]) open(views[event.key - 1].id, { focus: true });
});

function moveLayer(by) {
  const slider = main.querySelector('.layer-slider');
  if (!slider) return;
  slider.value = Number(slider.value) + by;
  slider.dispatchEvent(new Event('input'));
}

function step(by) {
  views.find((view) => view.id === state.view).step?.(by);
}

addEventListener('hashchange', () => {
  if (location.hash.slice(1) !== state.view) open(location.hash.slice(1));
});

setTheme('auto');
drawModels();
open(location.hash.slice(1));
// Not before the first view is on the screen: nobody waits for it.
requestIdleCallback?.(() => loadPlotly(), { timeout: 1500 });
document.documentElement.dataset.ready = performance.now().toFixed(0);
