// What stands in words and tables: before and after, decisions, sharding, levers, the measured step, assumptions.
const mono = (text) => make('span', { class: 'mono', text });

function bars(data) {
  const top = Math.max(data.budget_bytes, ...data.estimates.map((each) => each.peak_bytes)) * 1.08;
  const percent = (bytes) => `${(100 * bytes) / top}%`;
  const limit = () => {
    const mark = make('i', { class: 'limit', 'aria-hidden': 'true' });
    mark.style.left = percent(data.budget_bytes);
    return mark;
  };
  const rows = data.estimates.map((estimate) => {
    const parts = STACK.filter((row) => estimate.by_category[row]).map((row) => {
      const part = make('i', { title: `${data.categories[row]} ${showBytes(estimate.by_category[row])}` });
      part.style.width = `${(100 * estimate.by_category[row]) / estimate.peak_bytes}%`;
      part.style.background = `var(--category-${row})`;
      return part;
    });
    const filled = make('div', { class: 'fill' }, ...parts);
    filled.style.width = percent(estimate.peak_bytes);
    if (!parts.length) filled.style.background = 'var(--decision-1)';
    return make('div', { class: 'row' }, make('span', { text: estimate.name }), make('b', { text: showBytes(estimate.peak_bytes) }),
      make('div', { class: 'track' }, filled, limit()));
  });
  const mark = make('span', { text: `${data.budget_is} ${showBytes(data.budget_bytes)}` });
  const at = percent(data.budget_bytes);
  mark.style.left = at;
  mark.style.transform = `translateX(-${at})`;
  put(byId('bars'), ...rows, make('div', { class: 'row' }, make('div', { class: 'scale' }, mark)));
}

function estimates(data) {
  const columns = data.estimates;
  const occurring = bySize(data, data.categories.map((_, row) => row).filter((row) => columns.some((each) => each.by_category[row])));
  const some = (name) => columns.some((each) => each[name] !== null && each[name] !== undefined);
  const value = (name, show) => (each) => (each[name] === null || each[name] === undefined ? '' : show(each[name]));
  const rows = [
    { name: 'peak', of: value('peak_bytes', showBytes), total: true },
    ...occurring.map((row) => ({ row, name: data.categories[row], of: (each) => (each.by_category[row] ? showBytes(each.by_category[row]) : '') })),
    some('reserved_bytes') && { name: 'reserved by the allocator', of: value('reserved_bytes', showBytes) },
    some('step_ms') && { name: 'step', of: value('step_ms', showMs), total: true },
    some('recompute_ms') && { name: 'recomputing', of: value('recompute_ms', showMs) },
    some('exposed_ms') && { name: 'waiting for communication', of: value('exposed_ms', showMs) },
    some('offload_ms') && { name: 'waiting for offload', of: value('offload_ms', showMs) },
  ].filter(Boolean);
  byId('estimates').append(table([
    { name: data.ranks > 1 ? `on each of ${data.ranks} ranks` : '', head: true,
      of: (row) => make('span', { class: 'with-swatch' }, row.row === undefined ? null : swatch(`category-${row.row}`), make('span', { text: row.name })) },
    ...columns.map((column) => ({
      name: column.name, number: true, of: (row) => row.of(column),
    })),
  ], rows));
}

// What kinds of decisions were taken together: what each saves, what it costs, and the price of a GiB there.
function decidedTable({ columns, rows, price }) {
  if (!rows.length) return null;
  return make('div', { class: 'block' }, table(columns.map((name, place) => ({
    name, head: place === 0, number: place > 1, of: (row) => row[place],
  })), rows, { cards: true, caption: `Decided together${price ? `; ${price}` : ''}.` }));
}

function decisionTable(data) {
  const together = decidedTable(data.decided);
  if (together) byId('decisions-body').append(together);
  if (!data.decisions.length) return Boolean(together);
  const tones = { kept: 1, 'partly saved': 2, 'runs again in full': 3, offloaded: 4, 'partly offloaded': 4 };
  const away = data.decisions.some((row) => row.all_away_bytes);
  byId('decisions-body').append(table([
    { name: 'unit', head: true, of: (row) => make('span', {}, mono(row.unit), row.kind && row.kind !== row.unit ? make('span', { class: 'soft', text: ` ${row.kind}` }) : null) },
    { name: 'units', number: true, of: (row) => String(row.units), sort: (row) => row.units },
    { name: 'decision', of: (row) => {
      const tag = make('span', { class: 'tag', text: row.decision });
      tag.style.background = `var(--decision-${tones[row.decision]})`;
      tag.style.color = `var(--on-decision-${tones[row.decision]})`;
      return tag;
    } },
    { name: 'drops', number: true, of: (row) => (row.all_bytes ? make('span', {}, showBytes(row.all_bytes), small(row.units > 1 ? `${showBytes(row.drops_bytes)} each` : '')) : ''), sort: (row) => row.all_bytes },
    away && { name: 'offloads', number: true, of: (row) => (row.all_away_bytes ? make('span', {}, showBytes(row.all_away_bytes), small(row.units > 1 ? `${showBytes(row.away_bytes)} each` : '')) : ''), sort: (row) => row.all_away_bytes },
    { name: 'recomputing', number: true, of: (row) => (row.all_bytes ? make('span', {}, showMs(row.all_ms), small(row.units > 1 ? `${showMs(row.each_ms)} each` : '')) : ''), sort: (row) => row.all_ms },
    { name: 'keeps', of: (row) => (row.decision !== 'kept' ? make('span', {}, row.keeps_bytes ? showBytes(row.keeps_bytes) + (row.units > 1 ? ' each' : '') : 'nothing', row.keeps ? small(row.keeps, true) : null) : row.keeps) },
    { name: 'runs again', of: (row) => (row.again ? mono(row.again) : '') },
    { name: 'why', of: (row) => row.why, sort: (row) => row.rate },
  ].filter(Boolean), data.decisions, { cards: true, caption: 'Units whose paths differ in numbers only and that get the same policy are one row.' }));
  return true;
}

function small(text, code) {
  return text ? make('small', { class: code ? 'under mono' : 'under', text }) : null;
}

function sharding(data) {
  if (!data.shard) return false;
  const shard = data.shard;
  const list = make('dl', { class: 'facts block' });
  facts(list, [
    ['ranks', String(shard.ranks)],
    ['gathered ahead', counted(shard.prefetch, 'unit')],
    ...shard.dtypes.map(([name, dtype]) => [name, dtype, true]),
    ['communication', `${showMs(shard.communication_ms)} a step, ${showMs(shard.exposed_ms)} of it not hidden by compute`],
  ]);
  byId('sharding-body').append(list, table([
    { name: 'unit', head: true, of: (row) => mono(row.unit) },
    { name: 'units', number: true, of: (row) => String(row.units) },
    { name: 'shard each', number: true, of: (row) => showBytes(row.shard_bytes), sort: (row) => row.shard_bytes },
    { name: 'gathered each', number: true, of: (row) => showBytes(row.gathered_bytes), sort: (row) => row.gathered_bytes },
    { name: 'whole gradient', number: true, of: (row) => showBytes(row.gradient_bytes) },
    { name: 'reduced', number: true, of: (row) => showBytes(row.reduced_bytes) },
    { name: 'after forward', of: (row) => (row.kept ? 'stays gathered' : 'is freed, gathered again') },
  ], shard.units, { cards: true }));
  return true;
}

// What each dimension of a mesh does, for a step that is parallel by its own code.
function meshTable(data) {
  if (!data.mesh.length) return false;
  byId('mesh-body').append(table([
    { name: 'dimension', head: true, of: (row) => mono(row.name) },
    { name: 'ranks', number: true, of: (row) => String(row.size), sort: (row) => row.size },
    { name: 'on nodes', number: true, of: (row) => String(row.nodes), sort: (row) => row.nodes },
    { name: 'collectives', number: true, of: (row) => String(row.collectives), sort: (row) => row.collectives },
    { name: 'bytes', number: true, of: (row) => showBytes(row.sent_bytes), sort: (row) => row.sent_bytes },
    { name: 'time', number: true, of: (row) => showMs(row.communication_ms), sort: (row) => row.communication_ms },
    { name: 'exposed', number: true, of: (row) => showMs(row.exposed_ms), sort: (row) => row.exposed_ms },
    { name: 'made, at the peak', number: true, of: (row) => showBytes(row.at_peak_bytes), sort: (row) => row.at_peak_bytes },
  ], data.mesh, { cards: true, caption: 'Collectives of one step; exposed is what they add to it.' }));
  return true;
}

// Levers; where nothing fits the budget, each says whether it is enough by itself.
function leverTable(levers, budget = null) {
  const cost = (ms) => (ms === null || ms === undefined ? 'not known' : Math.abs(ms) < 1e-3 ? 'nothing' : ms < 0 ? `${showMs(-ms)} faster` : showMs(ms));
  return table([
    { name: 'lever', head: true, of: (lever) => make('span', {}, lever.name, small(lever.how)) },
    { name: 'saves', number: true, of: (lever) => showBytes(lever.saves_bytes), sort: (lever) => lever.saves_bytes },
    { name: 'costs a step', number: true, of: (lever) => cost(lever.costs_ms), sort: (lever) => lever.costs_ms || 0 },
    { name: 'peak then', number: true, of: (lever) => showBytes(lever.peak_bytes), sort: (lever) => lever.peak_bytes },
    budget !== null && { name: 'for the budget', of: (lever) => (lever.peak_bytes <= budget ? 'enough by itself' : `${showBytes(lever.peak_bytes - budget)} missing`) },
    { name: 'how it is known', of: (lever) => make('span', {}, lever.basis, small([
      lever.assumes, lever.same_numbers === false ? 'changes the numbers' : '',
    ].filter(Boolean).join('; '))) },
  ].filter(Boolean), levers, { cards: true });
}

function blocked(data) {
  const blocker = data.blocker;
  if (!blocker) return false;
  const list = make('dl', { class: 'facts block' });
  facts(list, [
    ['where', blocker.place],
    ['no plan gets below', showBytes(blocker.peak_bytes)],
    ...(blocker.minimum_budget_bytes === null ? [] : [['smallest budget that works', showBytes(blocker.minimum_budget_bytes)]]),
  ]);
  byId('blocker-body').append(list);
  if (data.levers.length) byId('blocker-body').append(make('h3', { text: 'What would help, on top of the plan that needs least' }), leverTable(data.levers, data.budget_bytes));
  return true;
}

function measuredTables(data) {
  const found = data.verification;
  if (!found) return false;
  const verdict = found.ok ? 'The plan holds' : found.only_time_differs ? 'The plan holds, but for its time,' : 'The plan does not hold';
  const good = found.ok || found.only_time_differs;
  const columns = (unit, show) => [
    { name: unit === 'bytes' ? 'memory' : 'time', head: true, of: (row) => row.name },
    { name: 'predicted', number: true, of: (row) => show(row[`predicted_${unit}`]) },
    { name: 'measured', number: true, of: (row) => show(row[`measured_${unit}`]) },
    { name: 'difference', number: true, of: (row) => {
      const more = row[`measured_${unit}`] - row[`predicted_${unit}`];
      if (!more) return 'none';
      const part = row[`predicted_${unit}`] ? ` (${signed(showShare(more, row[`predicted_${unit}`]), more)})` : '';
      return `${signed(show(more), more)}${part}`;
    } },
  ];
  const exact = found.exact
    ? `Losses, ${counted(found.gradients, 'gradient')}, parameters and buffers are the same bit for bit with and without the plan.`
    : found.skipped ? `The step without the plan was not run: ${found.skipped}` : '';
  byId('verified-body').append(
    make('p', {}, make('span', { class: 'holds', 'data-tone': good ? 'good' : 'bad', text: verdict }),
      ` on ${found.device}, measured over ${counted(found.steps, 'step')}.`),
    make('ul', { class: 'findings' }, ...found.findings.map((finding) => make('li', { text: finding }))),
    ...(exact ? [make('p', { class: 'line', text: exact })] : []),
    make('div', { class: 'block' }, table(columns('bytes', showBytes), found.bytes)),
    make('div', { class: 'block' }, table(columns('ms', showMs), found.ms)));
  return true;
}

function assumptions(data) {
  const { facts: rows, figures, notes } = data.assumed;
  const body = byId('assumed-body');
  if (notes.length) {
    body.append(make('h3', { text: 'Notes' }), make('ul', { class: 'findings' }, ...notes.map((note) => make('li', { text: note }))));
  }
  const list = make('dl', { class: 'facts' });
  facts(list, rows.map(([name, value]) => [name, value, name.startsWith('fingerprint')]));
  body.append(list);
  if (!figures.length) return true;
  const columns = [
    { name: 'figure', head: true, of: (row) => mono(row.key) },
    { name: 'value', number: true, of: (row) => row.value },
    { name: 'source', of: (row) => [row.source, row.publisher].filter(Boolean).join(', ') + (row.estimate ? ` (an estimate${row.reason ? `: ${row.reason}` : ''})` : '') },
    { name: 'date', of: (row) => row.date },
    { name: 'read', of: (row) => row.seen },
  ];
  body.append(make('details', {}, make('summary', { text: `The device’s ${counted(figures.length, 'figure')}, with sources` }),
    make('div', {}, table(columns, figures, { cards: true }))));
  return true;
}
