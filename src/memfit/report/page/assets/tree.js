// The modules as an icicle: as wide as the memory that they hold at the peak, or as the time that they run.
const DECISIONS = ['has units inside', 'kept', 'partly saved, partly run again', 'run again in full', 'offloaded'];
const TIMES = ['forward', 'backward', 'recomputing', 'optimizer', 'waiting for communication'];
const ROW = 26;
const LISTED = 60;

function moduleTree(data, state) {
  const holder = byId('icicle');
  const tree = data.tree;
  const count = tree.parent.length;
  const text = (number) => data.strings[number];
  const inside = Array.from({ length: count }, () => []);
  const depth = new Int32Array(count);
  const shard = new Set(tree.shard);
  const sums = new Map();
  const decided = tree.decision.some((decision) => decision > 1);
  let zoom = 0, pointed = 0, matches = null;
  let from = [0, 1], view = [0, 1], began = 0, frame = 0;
  tree.parent.forEach((parent, node) => {
    if (parent < 0) return;
    inside[parent].push(node);
    depth[node] = depth[parent] + 1;
  });

  // Of every node the sums with what is inside it, and where it lies, from 0 to 1.
  function measured() {
    const key = `${state.variant} ${state.metric}`;
    if (!sums.has(key)) {
      const own = tree[state.variant][state.metric];
      const total = new Float64Array(count), self = new Float64Array(count);
      for (let node = count - 1; node >= 0; node -= 1) {
        self[node] = Object.values(own[node] || {}).reduce((sum, value) => sum + value, 0);
        total[node] += self[node];
        if (tree.parent[node] >= 0) total[tree.parent[node]] += total[node];
      }
      const x = new Float64Array(count);
      const whole = total[0] || 1;
      for (let node = 0; node < count; node += 1) {
        let at = x[node];
        for (const child of inside[node]) {
          x[child] = at;
          at += total[child] / whole;
        }
      }
      sums.set(key, { total, self, x, whole });
    }
    return sums.get(key);
  }

  const show = (value) => (state.metric === 'ms' ? showMs(value) : showBytes(value));

  function above(node) {
    const chain = [];
    for (let each = node; each >= 0; each = tree.parent[each]) chain.unshift(each);
    return chain;
  }

  function span(node) {
    const { x, total, whole } = measured();
    return [x[node], x[node] + total[node] / whole];
  }

  function levelsShown() {
    let deepest = 0;
    const look = (node) => {
      deepest = Math.max(deepest, depth[node]);
      inside[node].forEach(look);
    };
    look(zoom);
    return deepest + 1;
  }

  function draw(now) {
    frame = 0;
    const width = holder.clientWidth;
    const height = levelsShown() * ROW + 2;
    holder.style.height = `${height}px`;
    const context = sharp(byId('tree'), width, height);
    context.font = `12px ${FONT}`;
    context.textBaseline = 'middle';
    const part = began ? Math.min(1, (now - began) / 180) : 1;
    const eased = part * (2 - part);
    const goal = span(zoom);
    view = goal.map((value, side) => from[side] + (value - from[side]) * eased);
    node(context, 0, width);
    if (part < 1) frame = requestAnimationFrame(draw);
    else began = 0;
  }

  function node(context, number, width) {
    const [begin, end] = span(number);
    const scale = width / Math.max(view[1] - view[0], 1e-12);
    const left = Math.max(0, (begin - view[0]) * scale), right = Math.min(width, (end - view[0]) * scale);
    if (right - left < 0.6) return;
    const top = depth[number] * ROW;
    const decision = tree.decision[number];
    const gap = right - left > 4 ? 1 : 0;
    const dim = matches !== null && !matches.has(number);
    context.globalAlpha = dim ? 0.3 : 1;
    context.fillStyle = colour(`decision-${decision}`);
    context.fillRect(left, top, right - left - gap, ROW - 1);
    if (shard.has(number)) {
      context.fillStyle = colour('shard');
      context.fillRect(left, top, right - left - gap, 3);
    }
    label(context, number, left, right, top, decision);
    context.globalAlpha = 1;
    if (number === pointed || (matches !== null && !dim && right - left > 2)) {
      context.strokeStyle = colour(number === pointed ? 'ink' : 'accent');
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, Math.max(1, right - left - gap - 2), ROW - 3);
    }
    for (const child of inside[number]) node(context, child, width);
  }

  function label(context, number, left, right, top, decision) {
    const room = right - left - 10;
    if (room < 14) return;
    let words = text(tree.name[number]);
    if (context.measureText(words).width > room) {
      let keep = words.length;
      while (keep > 1 && context.measureText(`${words.slice(0, keep)}…`).width > room) keep -= 1;
      if (keep < 3) return;
      words = `${words.slice(0, keep)}…`;
    }
    context.fillStyle = colour(`on-decision-${decision}`);
    context.textAlign = 'left';
    context.fillText(words, left + 5, top + ROW / 2 + 1);
    const value = show(measured().total[number]);
    const used = context.measureText(words).width + 16;
    if (context.measureText(value).width + used < room) {
      context.textAlign = 'right';
      context.globalAlpha *= 0.8;
      context.fillText(value, right - 6, top + ROW / 2 + 1);
    }
  }

  function redraw() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function zoomTo(number) {
    from = view.slice();
    zoom = number;
    pointed = number;
    began = matchMedia('(prefers-reduced-motion: reduce)').matches ? 0 : performance.now();
    crumbs();
    details();
    redraw();
  }

  function point(number) {
    if (number === pointed) return;
    pointed = number;
    details();
    redraw();
  }

  function at(event) {
    const area = holder.getBoundingClientRect();
    const row = Math.floor((event.clientY - area.top) / ROW);
    const value = view[0] + ((event.clientX - area.left) / area.width) * (view[1] - view[0]);
    let found = 0;
    while (depth[found] < row) {
      const next = inside[found].find((child) => {
        const [begin, end] = span(child);
        return begin <= value && value < end;
      });
      if (next === undefined) return depth[found] === row ? found : null;
      found = next;
    }
    return found;
  }

  function crumbs() {
    const chain = above(zoom);
    put(byId('crumbs'), ...chain.flatMap((each, place) => [
      place ? make('span', { 'aria-hidden': 'true', text: '›' }) : null,
      make('button', {
        type: 'button', text: text(tree.name[each]), onclick: () => zoomTo(each),
        'aria-current': each === zoom ? 'true' : null,
      }),
    ]));
  }

  function parts(number, kind) {
    const found = {};
    const add = (each) => {
      for (const [name, value] of Object.entries(tree[state.variant][kind][each] || {})) {
        found[name] = (found[name] || 0) + value;
      }
      inside[each].forEach(add);
    };
    add(number);
    return Object.entries(found).map(([name, value]) => ({ name: Number(name), value })).sort((a, b) => b.value - a.value);
  }

  function details() {
    const { total, self, whole } = measured();
    const kind = text(tree.kind[pointed]);
    const times = parts(pointed, 'ms'), bytes = parts(pointed, 'bytes');
    const sum = (rows) => rows.reduce((all, row) => all + row.value, 0);
    const what = state.metric === 'ms' ? 'of the step’s time' : 'of the peak';
    const list = make('dl', { class: 'facts' });
    facts(list, [
      ['module', text(tree.path[pointed]), true],
      ...(kind ? [['kind', kind, true]] : []),
      ...(decided || shard.size ? [['decision', [
        decided ? DECISIONS[tree.decision[pointed]] : null,
        shard.has(pointed) ? 'gathers its parameters as one unit' : null,
      ].filter(Boolean).join('; ') || 'none']] : []),
      ['at the peak', showBytes(sum(bytes))],
      ['time', times.length
        ? `${showMs(sum(times))}: ${times.map((row) => `${TIMES[row.name]} ${showMs(row.value)}`).join(', ')}` : 'none'],
      ['share', `${showShare(total[pointed], whole)} ${what}${inside[pointed].length && self[pointed] > 0
        ? `, ${showShare(self[pointed], whole)} not in a module inside it` : ''}`],
    ]);
    const children = inside[pointed].filter((child) => total[child] > 0).sort((a, b) => total[b] - total[a]);
    put(byId('node'),
      make('div', {}, make('h3', { text: 'This module' }), list),
      make('div', {}, make('h3', { text: 'What it holds at the peak' }), bytes.length ? table([
        { name: 'category', head: true, of: (row) => category(data, row.name) },
        { name: 'bytes', number: true, of: (row) => showBytes(row.value) },
      ], bytes, { bare: true }) : make('p', { class: 'note', text: 'Nothing.' })));
    const named = children.slice(0, 3).map((child) => `${text(tree.name[child])} ${show(total[child])}`).join(', ');
    holder.setAttribute('aria-valuetext', `${text(tree.path[pointed])}, ${show(total[pointed])}${named ? `; inside: ${named}` : ''}`);
  }

  function search() {
    const wanted = byId('search').value.trim().toLowerCase();
    const list = byId('matches');
    if (!wanted) {
      matches = null;
      list.hidden = true;
      byId('found').textContent = '';
      redraw();
      return;
    }
    const { total } = measured();
    const hits = [];
    for (let each = 0; each < count; each += 1) {
      const words = `${text(tree.path[each])} ${text(tree.kind[each])}`;
      if (words.toLowerCase().includes(wanted)) hits.push(each);
    }
    matches = new Set(hits);
    byId('found').textContent = hits.length ? counted(hits.length, 'module') + ' found' : 'no module has this in its name';
    list.hidden = !hits.length;
    put(list, ...hits.slice(0, LISTED).map((hit) => make('li', {}, make('button', {
      type: 'button', onclick: () => zoomTo(hit), onmouseenter: () => point(hit), onfocus: () => point(hit),
    }, make('span', { class: 'mono', text: text(tree.path[hit]) }), make('span', { class: 'number', text: show(total[hit]) })))),
    hits.length > LISTED ? make('li', { class: 'note', text: `and ${hits.length - LISTED} more; write more of the name` }) : null);
    redraw();
  }

  holder.addEventListener('pointermove', (event) => {
    const found = at(event);
    if (found !== null) point(found);
  });
  holder.addEventListener('click', (event) => {
    const found = at(event);
    if (found !== null) zoomTo(found === zoom && found ? tree.parent[found] : found);
  });
  holder.addEventListener('keydown', (event) => {
    const around = tree.parent[pointed] >= 0 ? inside[tree.parent[pointed]].filter((each) => measured().total[each] > 0) : [0];
    const here = around.indexOf(pointed);
    const first = inside[pointed].find((each) => measured().total[each] > 0);
    const to = {
      ArrowLeft: around[here - 1], ArrowRight: around[here + 1],
      ArrowUp: tree.parent[pointed] >= 0 ? tree.parent[pointed] : undefined, ArrowDown: first,
    }[event.key];
    if (event.key === 'Enter' || event.key === ' ') zoomTo(pointed);
    else if (event.key === 'Escape') zoomTo(Math.max(0, tree.parent[zoom]));
    else if (to !== undefined) {
      const inView = above(to).includes(zoom) || above(zoom).includes(to);
      if (inView) point(to);
      else zoomTo(to);
    } else if (!['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown'].includes(event.key)) return;
    event.preventDefault();
  });
  byId('search').addEventListener('input', search);

  const legend = decided ? [1, 2, 3, 4].filter((code) => code < 4 || tree.decision.includes(code)).map((code) => make('li', {}, swatch(`decision-${code}`), DECISIONS[code])) : [];
  if (shard.size) legend.push(make('li', {}, swatch('shard', 'band'), 'gathers its parameters as one unit'));
  put(byId('legend'), ...legend);
  crumbs();
  let shown = '';
  return function all() {
    const key = `${state.variant} ${state.metric}`;
    if (shown !== key) {
      shown = key;
      from = view = span(zoom);
      byId('tree-says').textContent = state.metric === 'ms'
        ? `${showMs(measured().whole)} a step, by the module that takes it.`
        : `${showBytes(measured().whole)} at the peak, by the module that made it or owns it.`;
      details();
      search();
    }
    draw(performance.now());
  };
}
