// Memory over the step: stacked areas by category, and what is there at one instant of it.
// A budget so many times the peak is not drawn to scale: everything else would be flat.
const FAR = 2.5;
// From the bottom up: what stays, then what comes and goes.
// Lanes under the phases, with what stands beside them: copies, collectives, recomputes and chunks of the loss.
const LANE = 18;
const LANE_NAMES = { recompute: 'recompute', chunk: 'loss', away: 'to host', back: 'back', gather: 'gather', reduce: 'reduce' };
const STACK = [0, 5, 1, 9, 6, 2, 7, 8, 3, 4];

function timelineChart(data, state) {
  const chart = byId('chart');
  const text = (number) => data.strings[number];
  const occurring = STACK.filter((row) => Object.values(data.timelines).some((each) => each.bytes[row]));
  const prepared = new Map();
  let place = 0;
  let frame = 0;
  let box = null;

  // Heights of the stack at every point, from the bottom up; the last is the total.
  function levels(name) {
    if (!prepared.has(name)) {
      const line = data.timelines[name];
      let under = new Float64Array(line.instant.length);
      const stack = occurring.map((row) => {
        const own = line.bytes[row];
        const over = own ? under.map((value, point) => value + own[point]) : under;
        const layer = { row, under, over, empty: !own };
        under = over;
        return layer;
      });
      prepared.set(name, { stack, total: under });
    }
    return prepared.get(name);
  }

  const line = () => data.timelines[state.variant];
  const across = () => (state.axis === 'ms' ? line().ms : line().instant);
  const most = () => (state.axis === 'ms' ? line().total_ms : line().instants) || 1;
  const lanes = () => Object.entries(line().lanes);
  const ends = (span) => (state.axis === 'ms' ? [span[3], span[4]] : [span[1], span[2]]);

  function layout() {
    const width = chart.clientWidth, height = chart.clientHeight;
    const narrow = width < 520;
    const far = data.budget_bytes > FAR * line().peak_bytes;
    const top = (far ? line().peak_bytes : Math.max(data.budget_bytes, line().peak_bytes)) * 1.15;
    const left = narrow ? 62 : 72, right = 10, above = 12, below = 42 + LANE * lanes().length;
    const plot = { left, top: above, width: width - left - right, height: height - above - below };
    return {
      width, height, narrow, plot, top, far,
      x: (value) => left + (value / most()) * plot.width,
      y: (bytes) => above + plot.height * (1 - bytes / top),
    };
  }

  function areas() {
    box = layout();
    const { plot, x, y } = box;
    const context = sharp(byId('areas'), box.width, box.height);
    const bottom = plot.top + plot.height;
    context.font = `12px ${FONT}`;
    grid(context);
    const { stack } = levels(state.variant);
    const at = Float64Array.from(across(), x);
    const end = x(most());
    for (const layer of stack) {
      if (layer.empty) continue;
      context.beginPath();
      steps(context, at, end, layer.over, y, false);
      steps(context, at, end, layer.under, y, true);
      context.closePath();
      context.fillStyle = colour(`category-${layer.row}`);
      context.fill();
    }
    context.save();
    context.beginPath();
    context.rect(plot.left, plot.top, plot.width, plot.height);
    context.clip();
    context.fillStyle = colour('ink');
    context.globalAlpha = 0.12;
    for (const run of line().runs) {
      const [from, to] = ends(run);
      context.fillRect(x(from), plot.top, Math.max(1, x(to) - x(from)), plot.height);
    }
    context.restore();
    strips(context, bottom);
    budget(context);
    peak(context);
  }

  // An outline in steps: an instant keeps its level until the next one.
  function steps(context, at, end, levelsOf, y, back) {
    const count = at.length;
    for (let step = 0; step < count; step += 1) {
      const point = back ? count - 1 - step : step;
      const from = at[point], to = point + 1 < count ? at[point + 1] : end, height = y(levelsOf[point]);
      context.lineTo(back ? to : from, height);
      context.lineTo(back ? from : to, height);
    }
  }

  function segment(context, fromX, fromY, toX, toY) {
    context.beginPath();
    context.moveTo(fromX, fromY);
    context.lineTo(toX, toY);
    context.stroke();
  }

  function grid(context) {
    const { plot, y, top, x, narrow } = box;
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    context.lineWidth = 1;
    for (const tick of ticks(top, 6, true)) {
      const height = Math.round(y(tick)) + 0.5;
      context.strokeStyle = colour('line');
      segment(context, plot.left, height, plot.left + plot.width, height);
      context.fillStyle = colour('soft');
      context.fillText(shortBytes(tick), plot.left - 8, height);
    }
    context.textBaseline = 'top';
    const marks = ticks(most(), narrow ? 4 : 8, false);
    for (const tick of marks) {
      const shown = state.axis === 'ms' ? shortMs(tick) : tick.toLocaleString('en');
      context.textAlign = tick === 0 ? 'left' : x(tick) > plot.left + plot.width - 24 ? 'right' : 'center';
      context.fillText(shown, x(tick), plot.top + plot.height + 26 + LANE * lanes().length);
    }
  }

  // Under the plot: the phases, and a lane for each kind of thing that the plan does.
  function strips(context, bottom) {
    const { x, plot } = box;
    lanes().forEach(([key, spans], number) => {
      const top = bottom + 26 + LANE * number;
      context.fillStyle = colour('faint');
      context.fillRect(plot.left, top, plot.width, LANE - 4);
      context.fillStyle = colour(`lane-${key}`);
      for (const span of spans) {
        const [from, to] = ends(span).map(x);
        context.fillRect(from, top, Math.max(1, to - from - 0.5), LANE - 4);
      }
      context.fillStyle = colour('soft');
      context.font = `11px ${FONT}`;
      context.textAlign = 'right';
      context.textBaseline = 'middle';
      context.fillText(LANE_NAMES[key], plot.left - 6, top + LANE / 2 - 2);
    });
    context.font = `12px ${FONT}`;
    context.textBaseline = 'middle';
    context.textAlign = 'center';
    line().phases.forEach((span, number) => {
      const [from, to] = ends(span).map(x);
      context.fillStyle = colour(number % 2 ? 'faint' : 'line');
      context.fillRect(from, bottom + 4, Math.max(0, to - from), 18);
      const name = data.phases[span[0]];
      if (context.measureText(name).width + 8 < to - from) {
        context.fillStyle = colour('ink');
        context.fillText(name, (from + to) / 2, bottom + 13.5);
      }
      if (number) {
        context.strokeStyle = colour('soft');
        context.globalAlpha = 0.6;
        segment(context, Math.round(from) + 0.5, plot.top, Math.round(from) + 0.5, bottom);
        context.globalAlpha = 1;
      }
    });
  }

  function budget(context) {
    const { plot, y, far } = box;
    const words = `${data.budget_is} ${showBytes(data.budget_bytes)}`;
    if (far) {
      tagged(context, `↑ ${words}, far above`, plot.left + plot.width - 4, plot.top + 8, 'right', 'limit');
      return;
    }
    const height = Math.round(y(data.budget_bytes)) + 0.5;
    context.strokeStyle = colour('limit');
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    segment(context, plot.left, height, plot.left + plot.width, height);
    context.setLineDash([]);
    tagged(context, words, plot.left + plot.width - 4, height - 9, 'right', 'limit');
  }

  // Text on a ground of its own, readable over any colour.
  function tagged(context, words, x, y, align, name) {
    context.font = `600 12px ${FONT}`;
    context.textAlign = align;
    context.textBaseline = 'middle';
    const width = context.measureText(words).width + 8;
    const from = align === 'right' ? x - width + 4 : align === 'left' ? x - 4 : x - width / 2;
    context.globalAlpha = 0.85;
    context.fillStyle = colour('card');
    context.fillRect(from, y - 8, width, 16);
    context.globalAlpha = 1;
    context.fillStyle = colour(name);
    context.fillText(words, x, y);
    context.font = `12px ${FONT}`;
  }

  function peak(context) {
    const { x, y, plot } = box;
    const found = line();
    const px = x(across()[found.peak]), py = y(found.peak_bytes);
    context.fillStyle = colour('ink');
    context.strokeStyle = colour('card');
    context.lineWidth = 2;
    context.beginPath();
    context.arc(px, py, 5, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    const far = px > plot.left + plot.width * 0.6;
    const near = Math.abs(y(data.budget_bytes) - py) < 18;
    const height = near && py > y(data.budget_bytes) ? py + 15 : Math.max(plot.top + 8, py - (near ? 15 : 2));
    tagged(context, `peak ${showBytes(found.peak_bytes)}`, far ? px - 11 : px + 11, height, far ? 'right' : 'left', 'ink');
  }

  function cursor() {
    frame = 0;
    if (!box) return;
    const { x, y, plot } = box;
    const context = sharp(byId('cursor'), box.width, box.height);
    const px = x(across()[place]);
    context.strokeStyle = colour('ink');
    context.lineWidth = 1;
    segment(context, Math.round(px) + 0.5, plot.top, Math.round(px) + 0.5, plot.top + plot.height + 22 + LANE * lanes().length);
    context.fillStyle = colour('card');
    context.beginPath();
    context.arc(px, y(levels(state.variant).total[place]), 4, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    details();
  }

  const words = (key, span) => `${data.lanes[key]}: ${text(span[0])}, ${showBytes(span[5])}`;

  // What lanes show at this instant, as rows of facts; a recompute is in the phase already.
  function beside(ms, instant) {
    return lanes().filter(([key]) => key !== 'recompute').flatMap(([key, spans]) => spans
      .filter((span) => span[3] <= ms && ms < Math.max(span[4], span[3] + 1e-9) && (state.axis === 'ms' || span[1] <= instant))
      .slice(0, 1).map((span) => ['meanwhile', words(key, span)]));
  }

  // What is under the pointer in a lane, in a note beside it.
  function tell(event) {
    const note = byId('lane-note'), { left, top } = chart.getBoundingClientRect();
    const px = event.clientX - left, py = event.clientY - top - box.plot.top - box.plot.height - 26;
    const [key, spans] = lanes()[Math.floor(py / LANE)] || [];
    const reach = 3;
    const found = py >= 0 && spans && spans.find((span) => {
      const [from, to] = ends(span).map(box.x);
      return px >= from - reach && px <= Math.max(to, from + 1) + reach;
    });
    note.hidden = !found;
    if (!found) return;
    note.textContent = `${words(key, found)}, ${showMs(found[4] - found[3])}`;
    note.style.top = `${event.clientY - top - 40}px`;
    note.style.left = `${Math.max(0, Math.min(px - note.offsetWidth / 2, box.width - note.offsetWidth))}px`;
  }

  function details() {
    const found = line();
    const total = levels(state.variant).total[place];
    const left = data.budget_bytes - total;
    const again = found.run[place] >= 0 ? text(found.run[place]) : null;
    const module = found.module[place] >= 0 ? text(found.module[place]) : 'outside any module';
    const phase = data.phases[found.phase[place]];
    facts(byId('here'), [
      ['op', text(found.op[place]), true],
      ['phase', again === null ? phase : `${phase}, second run of ${again}`],
      ['module', module, found.module[place] >= 0],
      ['source', found.source[place] >= 0 ? text(found.source[place]) : 'none of the user’s', found.source[place] >= 0],
      ['in use', `${showBytes(total)}${place === found.peak ? ', the peak' : ''}`],
      [data.budget_is, left >= 0 ? `${showBytes(left)} left` : `${showBytes(-left)} too much`],
      ...beside(found.ms[place], found.instant[place]),
      ...(found.workspace[place] ? [['workspace', `${showBytes(found.workspace[place])} of this op`]] : []),
      ['when', `${showMs(found.ms[place])}, instant ${found.instant[place].toLocaleString('en')} of ${found.instants.toLocaleString('en')}`],
    ]);
    put(byId('by-category'), table([
      { name: 'category', head: true, of: (row) => category(data, row.row) },
      { name: 'bytes', number: true, of: (row) => showBytes(row.bytes) },
      { name: 'share', number: true, of: (row) => showShare(row.bytes, total) },
    ], bySize(data, occurring).map((row) => ({ row, bytes: found.bytes[row] ? found.bytes[row][place] : 0 })), { bare: true }));
    const numbers = found.alive[place];
    const held = [];
    for (let item = 0; item < numbers.length; item += 2) {
      const [each, row, name, where, remade] = found.groups[numbers[item]];
      const count = numbers[item + 1];
      const notes = [
        where >= 0 && text(where) !== text(name) ? text(where) : null,
        count > 1 ? `${showBytes(each)} each` : null,
        remade ? 'made again' : null,
      ].filter(Boolean);
      held.push(make('li', {},
        swatch(`category-${row}`),
        make('span', { class: 'what' },
          make('span', { class: 'mono', text: count > 1 ? `${count} × ${text(name)}` : text(name) }),
          make('small', { text: [data.categories[row], ...notes].join(', ') })),
        make('span', { class: 'number', text: showBytes(each * count) })));
    }
    put(byId('alive'), make('ul', { class: 'held' }, ...held));
    chart.setAttribute('aria-valuemax', found.instant.length - 1);
    chart.setAttribute('aria-valuenow', place);
    chart.setAttribute('aria-valuetext', `${text(found.op[place])}, ${module}, ${phase}, ${showBytes(total)}`);
  }

  function move(to) {
    place = Math.min(Math.max(to, 0), line().instant.length - 1);
    if (!frame) frame = requestAnimationFrame(cursor);
  }

  // The point whose instant is shown at a position: the last that has begun there.
  function nearest(clientX) {
    const { left } = chart.getBoundingClientRect();
    const value = ((clientX - left - box.plot.left) / box.plot.width) * most();
    const values = across();
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (values[middle] <= value) low = middle;
      else high = middle - 1;
    }
    return within(low, value);
  }

  // Points closer than a few pixels cannot be told apart: the highest of them is meant.
  function within(point, value) {
    const values = across(), { total } = levels(state.variant), reach = (3 / box.plot.width) * most();
    let best = point;
    for (let other = point; other >= 0 && value - values[other] <= reach; other -= 1) if (total[other] > total[best]) best = other;
    for (let other = point + 1; other < values.length && values[other] - value <= reach; other += 1) if (total[other] > total[best]) best = other;
    return best;
  }

  for (const kind of ['pointermove', 'pointerdown']) {
    chart.addEventListener(kind, (event) => {
      move(nearest(event.clientX));
      tell(event);
    });
  }
  chart.addEventListener('pointerleave', () => { byId('lane-note').hidden = true; });
  chart.addEventListener('keydown', (event) => {
    const count = line().instant.length, jump = Math.max(1, Math.round(count / 20));
    const to = {
      ArrowLeft: place - 1, ArrowDown: place - 1, ArrowRight: place + 1, ArrowUp: place + 1,
      PageDown: place - jump, PageUp: place + jump, Home: 0, End: count - 1, p: line().peak, P: line().peak,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(to);
  });

  function summary() {
    const found = line();
    const where = found.module[found.peak] >= 0 ? `in ${text(found.module[found.peak])}` : 'outside any module';
    const again = found.run[found.peak] >= 0 ? `second run of ${text(found.run[found.peak])}` : data.phases[found.phase[found.peak]];
    const least = data.budget_bytes - found.peak_bytes;
    put(byId('drawn-peak'),
      make('strong', { text: `Peak ${showBytes(found.peak_bytes)}` }),
      ` in ${text(found.op[found.peak])}, ${again}, ${where}: `
      + (least >= 0 ? `${showBytes(least)} below the ${data.budget_is}.` : `${showBytes(-least)} above the ${data.budget_is}.`)
      + (found.runs.length ? ` ${counted(found.runs.length, 'recomputation')} shaded.` : ''));
  }

  chart.setAttribute('aria-valuemin', 0);
  let shown = null;
  return function draw() {
    chart.style.setProperty('--lanes', lanes().length);
    if (shown !== state.variant) {
      shown = state.variant;
      place = line().peak;
      summary();
    }
    areas();
    cursor();
  };
}
