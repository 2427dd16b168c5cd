// Elements of the page. Text from the data goes in as text, never as markup.
const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'text') element.textContent = value;
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
}

function put(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A patch of one of the page's colours.
function swatch(name, kind) {
  const patch = make('i', { class: kind ? `swatch ${kind}` : 'swatch', 'aria-hidden': 'true' });
  patch.style.background = `var(--${name})`;
  return patch;
}

function category(data, row) {
  return make('span', { class: 'with-swatch' }, swatch(`category-${row}`), make('span', { text: data.categories[row] }));
}

// Categories as the first table of the page has them: those first that are largest at a peak.
function bySize(data, rows) {
  const most = (row) => Math.max(...data.estimates.map((each) => each.by_category[row] || 0));
  return rows.slice().sort((a, b) => most(b) - most(a));
}

// A custom property as a colour that a canvas takes, in the theme that is shown.
const probe = make('span', { hidden: true, 'aria-hidden': 'true' });
const shades = new Map();

function colour(name) {
  if (!shades.has(name)) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(--${name})`;
    shades.set(name, getComputedStyle(probe).color);
  }
  return shades.get(name);
}

// A canvas as sharp as the screen is; gives its context with units of CSS pixels.
function sharp(canvas, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif';

// A group of radio buttons; `all` of the same name stay in step.
function choice(fieldset, name, options, state) {
  if (options.length < 2) {
    fieldset.hidden = true;
    return;
  }
  for (const [value, text] of options) {
    const input = make('input', {
      type: 'radio', name: fieldset.id, value, onchange: () => state.set(name, value),
    });
    input.checked = state[name] === value;
    state.listen(() => { input.checked = state[name] === value; });
    fieldset.append(make('label', {}, input, make('span', { text })));
  }
}

// A table. A column is { name, of(row) -> text or element, number, head, sort(row) }.
function table(columns, rows, options = {}) {
  let order = rows.slice();
  const body = make('tbody', { role: 'rowgroup' });
  const cells = (row) => columns.map((column) => {
    const content = column.of(row);
    const attributes = {
      class: [column.number && 'number', content === '' && 'nothing'].filter(Boolean).join(' ') || null,
      'data-label': column.name,
    };
    if (column.head) Object.assign(attributes, { scope: 'row', role: 'rowheader' });
    else attributes.role = 'cell';
    return make(column.head ? 'th' : 'td', attributes, content);
  });
  const draw = () => put(body, ...order.map((row) => (
    make('tr', { role: 'row', class: row.total ? 'total' : null }, ...cells(row)))));
  const heads = columns.map((column) => {
    const head = make('th', { scope: 'col', role: 'columnheader', class: column.number ? 'number' : null });
    if (!column.sort) return fill(head, { text: column.name }, []);
    head.setAttribute('aria-sort', 'none');
    head.append(make('button', {
      type: 'button',
      text: column.name,
      onclick: () => {
        const down = head.getAttribute('aria-sort') !== 'descending';
        heads.forEach((each) => each.hasAttribute('aria-sort') && each.setAttribute('aria-sort', 'none'));
        head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
        order = rows.slice().sort((a, b) => (down ? -1 : 1) * (column.sort(a) - column.sort(b)));
        draw();
      },
    }));
    return head;
  });
  draw();
  return make('div', { class: options.cards ? 'scroll block' : 'scroll' },
    make('table', { role: 'table', class: options.cards ? 'cards' : null },
      options.caption ? make('caption', { text: options.caption }) : null,
      make('thead', { role: 'rowgroup', hidden: options.bare }, make('tr', { role: 'row' }, ...heads)),
      body));
}

function facts(list, rows) {
  put(list, ...rows.flatMap(([name, value, mono]) => [
    make('dt', { text: name }),
    make('dd', { class: mono ? 'mono' : null }, value),
  ]));
}
