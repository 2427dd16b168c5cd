// Bytes and times as people read them, the same as in the terminal.
const UNITS = [['TiB', 2 ** 40], ['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]];

function showBytes(n) {
  const unit = UNITS.find(([, size]) => Math.abs(n) >= size);
  return unit ? `${(n / unit[1]).toFixed(2)} ${unit[0]}` : `${Math.round(n)} B`;
}

function showMs(ms) {
  const size = Math.abs(ms);
  if (size === 0) return '0 ms';
  if (size < 1) return `${Number((ms * 1e3).toPrecision(3))} us`;
  if (size < 1e3) return `${ms.toFixed(1)} ms`;
  if (size < 60e3) return `${(ms / 1e3).toFixed(2)} s`;
  if (size < 3600e3) return `${(ms / 60e3).toFixed(1)} min`;
  return `${(ms / 3600e3).toFixed(1)} h`;
}

function showShare(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(1)}%` : '';
}

function signed(text, value) {
  return value > 0 ? `+${text}` : text;
}

function counted(number, name) {
  return `${number.toLocaleString('en')} ${name}${number === 1 ? '' : 's'}`;
}

// Round steps for an axis from 0: at most `most` of them, 1, 2 or 5 (bytes: powers of two) apart.
function ticks(top, most, binary) {
  if (!(top > 0)) return [0];
  let step = binary ? 2 ** Math.ceil(Math.log2(top / most)) : 10 ** Math.floor(Math.log10(top / most));
  if (!binary) step *= [1, 2, 5, 10].find((factor) => top / (step * factor) <= most);
  return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, place) => place * step);
}

const shorter = (text) => text.replace(/(\.\d*?)0+ /, (_, kept) => (kept === '.' ? ' ' : `${kept} `));
const shortBytes = (n) => shorter(showBytes(n));
const shortMs = (ms) => shorter(showMs(ms));
