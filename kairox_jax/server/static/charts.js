// Canvas charts: stacked areas, a line, bars up and down, a heat map. Each takes plain arrays.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function open(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext('2d');
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return { pen, width, height };
}

// The next of 1, 2, 5, 10, 20 ... that holds a value.
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

function rule(pen, y, width, text, below = false) {
  pen.strokeStyle = colour('line');
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(0, Math.round(y) + 0.5);
  pen.lineTo(width, Math.round(y) + 0.5);
  pen.stroke();
  if (!text) return;
  pen.fillStyle = colour('soft');
  pen.textBaseline = below ? 'top' : 'bottom';
  pen.fillText(text, 0, y + (below ? 4 : -3));
}

const TOP = 17; // room for the scale's label

export function stacked(canvas, columns, names, kept, unit) {
  const { pen, width, height } = open(canvas);
  const count = columns[0].length;
  const sums = columns[0].map((_, i) => columns.reduce((sum, column) => sum + column[i], 0));
  const sorted = [...sums].sort((a, b) => a - b);
  const top = nice(1.15 * (sorted[Math.floor(0.97 * (count - 1))] ?? 0)); // one slow step does not flatten the rest
  const floor = height - 1;
  const y = (value) => floor - (Math.min(value, top) / top) * (floor - TOP);
  const x = (i) => width - ((count - 1 - i) / (kept - 1)) * width;
  rule(pen, TOP, width, `${top} ${unit}`);
  if (count > 1) {
    let below = new Array(count).fill(0);
    columns.forEach((column, k) => {
      const above = column.map((value, i) => value + below[i]);
      pen.fillStyle = colour(names[k]);
      pen.beginPath();
      above.forEach((value, i) => pen.lineTo(x(i), y(value)));
      for (let i = count - 1; i >= 0; i -= 1) pen.lineTo(x(i), y(below[i]));
      pen.fill();
      below = above;
    });
  }
  rule(pen, floor, width);
}

export function line(canvas, values, name, kept) {
  const { pen, width, height } = open(canvas);
  const floor = height - 1;
  const x = (i) => width - ((values.length - 1 - i) / (kept - 1)) * width;
  rule(pen, TOP, width, '100 %');
  rule(pen, floor, width);
  pen.strokeStyle = colour(name);
  pen.lineWidth = 1.75;
  pen.lineJoin = 'round';
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo(x(i), floor - value * (floor - TOP)));
  pen.stroke();
}

export function upDown(canvas, up, down, kept) {
  const { pen, width, height } = open(canvas);
  const top = nice(Math.max(...up, ...down, 1));
  const middle = (TOP + height) / 2;
  const room = (height - TOP) / 2 - 1;
  const step = width / kept;
  const x = (i) => Math.round(width - (up.length - i) * step);
  rule(pen, TOP, width, `± ${top}`);
  up.forEach((value, i) => {
    pen.fillStyle = colour('gpu');
    pen.fillRect(x(i), middle - (value / top) * room, Math.max(x(i + 1) - x(i), 1), (value / top) * room);
    pen.fillStyle = colour('io');
    pen.fillRect(x(i), middle, Math.max(x(i + 1) - x(i), 1), (down[i] / top) * room);
  });
  rule(pen, middle, width);
}

const channels = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

export function heat(canvas, rows) {
  const height = Math.max(48, Math.min(180, rows.length * 7));
  canvas.style.height = `${height}px`;
  const { pen, width } = open(canvas);
  if (!rows.length) return;
  const [from, to] = [channels(colour('heat-0')), channels(colour('heat-1'))];
  const shades = Array.from({ length: 101 }, (_, share) => {
    const mixed = from.map((value, k) => Math.round(value + ((to[k] - value) * share) / 100));
    return `rgb(${mixed.join(' ')})`;
  });
  const [tall, wide] = [height / rows.length, width / rows[0].length];
  rows.forEach((row, layer) => {
    row.forEach((share, bin) => {
      pen.fillStyle = shades[share];
      pen.fillRect(bin * wide, layer * tall, wide + 0.5, Math.max(tall - (tall > 4 ? 1 : 0), 0.5));
    });
  });
}
