// The trade-off: the shortest step for every budget, and the budget of the plan.
function tradeOff(data) {
  const curve = data.curve;
  if (!curve || !curve.points.length) return null;
  const { points, chosen } = curve;
  const says = byId('curve-says');

  function describe(point) {
    const slower = point.step_ms - curve.baseline_ms;
    put(says, make('strong', { text: `${showBytes(point.budget_bytes)}: ${showMs(point.step_ms)} a step` }),
      slower > 1e-9 ? `, ${showMs(slower)} (${showShare(slower, curve.baseline_ms)}) more than without recomputing.`
        : ', nothing is recomputed.',
      point.price_ms_per_gib > 0 ? ` One more GiB would save ${showMs(point.price_ms_per_gib)}.` : '');
  }

  function rest() {
    const first = points[0], last = points[points.length - 1];
    put(says, `From ${showBytes(first.budget_bytes)}, the smallest budget that works (`,
      make('strong', { text: showMs(first.step_ms) }), ` a step), to ${showBytes(last.budget_bytes)}, which needs nothing (`,
      make('strong', { text: showMs(last.step_ms) }), ').');
  }

  function draw() {
    const width = Math.max(280, byId('curve-chart').clientWidth), height = width < 520 ? 240 : 300;
    const left = 64, right = 24, top = 18, bottom = 40;
    const budgets = points.map((point) => point.budget_bytes).concat(chosen ? [chosen.budget_bytes] : []);
    const times = points.map((point) => point.step_ms).concat(chosen ? [chosen.step_ms] : []);
    const low = Math.min(...budgets), high = Math.max(...budgets), least = Math.min(...times), most = Math.max(...times);
    const pad = (most - least) * 0.1 || most * 0.05 || 1;
    const x = (bytes) => left + ((bytes - low) / (high - low || 1)) * (width - left - right);
    const y = (ms) => top + (1 - (ms - least + pad) / (most - least + 2 * pad)) * (height - top - bottom);
    const parts = [];
    for (let place = 0; place <= 4; place += 1) {
      const ms = least - pad + ((most - least + 2 * pad) * place) / 4;
      parts.push(drawing('line', { class: 'grid', x1: left, x2: width - right, y1: y(ms), y2: y(ms) }),
        drawing('text', { x: left - 8, y: y(ms) + 4, 'text-anchor': 'end', text: showMs(ms) }));
      const bytes = low + ((high - low) * place) / 4;
      if (width >= 520 || place % 2 === 0) {
        parts.push(drawing('text', {
          x: x(bytes), y: height - bottom + 18, 'text-anchor': place === 4 ? 'end' : place ? 'middle' : 'start', text: showBytes(bytes),
        }));
      }
    }
    parts.push(drawing('text', { x: width - right, y: height - 6, 'text-anchor': 'end', text: 'budget' }),
      drawing('polyline', { class: 'curve', points: points.map((point) => `${x(point.budget_bytes)},${y(point.step_ms)}`).join(' ') }));
    for (const point of points) {
      parts.push(drawing('circle', {
        class: 'dot', cx: x(point.budget_bytes), cy: y(point.step_ms), r: 5, tabindex: 0, role: 'img',
        'aria-label': `${showBytes(point.budget_bytes)}: ${showMs(point.step_ms)} a step`,
        onpointerenter: () => describe(point), onfocus: () => describe(point), onpointerleave: rest, onblur: rest,
      }));
    }
    if (chosen) {
      const cx = x(chosen.budget_bytes), cy = y(chosen.step_ms), end = cx > width * 0.6;
      parts.push(drawing('circle', { class: 'chosen', cx, cy, r: 7 }),
        drawing('text', {
          class: 'mark', x: end ? cx - 4 : cx + 4, y: cy - 14, 'text-anchor': end ? 'end' : 'start',
          text: `this plan, ${showMs(chosen.step_ms)}`,
        }));
    }
    put(byId('curve-chart'), drawing('svg', {
      viewBox: `0 0 ${width} ${height}`, role: 'group', 'aria-label': 'Step time for every budget',
    }, ...parts));
  }

  rest();
  byId('curve-table').append(table([
    { name: 'budget', head: true, of: (row) => showBytes(row.budget_bytes) },
    { name: 'peak', number: true, of: (row) => showBytes(row.peak_bytes) },
    { name: 'step', number: true, of: (row) => showMs(row.step_ms) },
    { name: 'recomputing', number: true, of: (row) => (row.recompute_ms > 0 ? showMs(row.recompute_ms) : '') },
    { name: 'one more GiB saves', number: true, of: (row) => (row.price_ms_per_gib > 0 ? showMs(row.price_ms_per_gib) : '') },
  ], points, { cards: true }));
  return draw;
}
