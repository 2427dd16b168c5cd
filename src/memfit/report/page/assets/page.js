// The page: what is chosen, and what is drawn again when that changes.
const data = JSON.parse(byId('data').textContent);
const listeners = [];
const state = {
  variant: data.timelines.planned ? 'planned' : 'baseline',
  axis: 'ms',
  metric: 'bytes',
  listen: (act) => listeners.push(act),
  set(name, value) {
    state[name] = value;
    listeners.forEach((act) => act());
  },
};

const without = data.estimates[0].name;
const variants = Object.keys(data.timelines).map((name) => [name, name === 'planned' ? 'with the plan' : without]);
choice(byId('variant-memory'), 'variant', variants, state);
choice(byId('variant-modules'), 'variant', variants, state);
choice(byId('axis'), 'axis', [['ms', 'time'], ['instant', 'op order']], state);
choice(byId('metric'), 'metric', [['bytes', 'memory at the peak'], ['ms', 'time']], state);

bars(data);
estimates(data);
const shown = [
  ['blocker', 'What helps', blocked(data)],
  ['memory', 'Memory', true],
  ['modules', 'Modules', true],
  ['curve', 'Budget', Boolean(data.curve)],
  ['decisions', 'Decisions', decisionTable(data)],
  ['sharding', 'Sharding', sharding(data)],
  ['mesh', 'Mesh', meshTable(data)],
  ['levers', 'Levers', data.levers.length > 0 && !data.blocker],
  ['verified', 'Measured', measuredTables(data)],
  ['assumed', 'Assumed', assumptions(data)],
].filter(([, , there]) => there);
if (data.levers.length && !data.blocker) byId('levers-body').append(leverTable(data.levers));
shown.forEach(([id]) => { byId(id).hidden = false; });
byId('sections').append(...shown.map(([id, text]) => make('a', { href: `#${id}`, text })));

const drawTimeline = timelineChart(data, state);
const drawTree = moduleTree(data, state);
const drawCurve = tradeOff(data);
state.listen(drawTimeline);
state.listen(drawTree);

function drawAll() {
  shades.clear();
  drawTimeline();
  drawTree();
  if (drawCurve) drawCurve();
}

const dark = matchMedia('(prefers-color-scheme: dark)');
const theme = byId('theme');
const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? 'dark' : 'light')) === 'dark';
function labelled() {
  theme.textContent = isDark() ? 'Light' : 'Dark';
  theme.setAttribute('aria-label', `Show the page in ${isDark() ? 'light' : 'dark'} colours`);
}
theme.addEventListener('click', () => {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  labelled();
  drawAll();
});
dark.addEventListener('change', () => {
  labelled();
  drawAll();
});
let waiting = 0;
window.addEventListener('resize', () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawAll);
});
window.addEventListener('beforeprint', drawAll);
window.addEventListener('afterprint', drawAll);
labelled();
drawAll();
