// The live view: asks the server for its last steps and draws them.
import { getJson } from './api.js';
import { heat, line, stacked, upDown } from './charts.js';
import { element } from './markdown.js';

const KEPT = 160; // steps in a chart
const POLL_MS = 600;
const TIMES = [['gpu', 'device'], ['io', 'link'], ['cpu', 'host']];
const PARTS = [
  ['dense_weights', 'weights'], ['kv_cache', 'cache'], ['workspace', 'workspace'], ['runtime', 'runtime'], ['slots', 'slots'],
  ['predictors', 'predictors'],
];
const find = (id) => document.getElementById(id);
const steps = {};
let since = 0;
let residency = { bins: [], neurons_per_bin: 0 };

export const kept = () => steps;

function append(fresh) {
  const ids = fresh.seq;
  for (const [name, values] of Object.entries(fresh)) {
    steps[name] = [...(steps[name] ?? []), ...values].slice(-KEPT);
  }
  if (ids.length) since = ids.at(-1);
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / Math.max(values.length, 1);
const share = (hit, rest) => (hit + rest ? hit / (hit + rest) : 0);

export function draw() {
  if (!steps.seq) return;
  const recent = (name) => mean(steps[name].slice(-20));
  stacked(find('c-times'), TIMES.map(([name]) => steps[`${name}_ms`]), TIMES.map(([name]) => name), KEPT, 'ms');
  const legend = TIMES.map(([name, text]) => entry(name, text, `${recent(`${name}_ms`).toFixed(1)} ms`));
  find('legend-times').replaceChildren(...legend);
  const hits = steps.hits.map((hit, i) => share(hit, steps.residual[i]));
  line(find('c-hits'), hits, 'gpu', KEPT);
  upDown(find('c-moves'), steps.promotions, steps.evictions, KEPT);
  find('v-hits').textContent = `${(100 * mean(hits.slice(-20))).toFixed(0)} %`;
  find('v-in').textContent = `+${recent('promotions').toFixed(1)}`;
  find('v-out').textContent = `−${recent('evictions').toFixed(1)}`;
  heat(find('c-heat'), residency.bins);
  const ms = TIMES.reduce((sum, [name]) => sum + recent(`${name}_ms`), 0);
  find('c-times').setAttribute('aria-label', `Time of each decode step by part; lately ${ms.toFixed(1)} ms together`);
}

function entry(swatch, text, value) {
  const item = element('li');
  const mark = element('span', '', { class: 'swatch' });
  mark.style.background = `var(--${swatch})`;
  item.append(mark, text, element('b', value));
  return item;
}

function numbers(live) {
  find('n-speed').textContent = live.tokens_per_s ? live.tokens_per_s.toFixed(1) : '–';
  find('n-hits').textContent = live.hit_rate === null ? '–' : `${(100 * live.hit_rate).toFixed(0)} %`;
  const times = steps.time_s ?? [];
  const gaps = times.slice(1).map((at, i) => at - times[i]).filter((gap) => gap < 5).slice(-20);
  find('n-ms').textContent = gaps.length ? (1000 * mean(gaps)).toFixed(1) : '–';
  find('n-queue').textContent = `${live.active} + ${live.waiting}`;
  find('n-queue').title = `${live.active} running, ${live.waiting} waiting`;
  const { modifier } = live.policy;
  if (modifier !== undefined) find('c-moves').title = `threshold modifier ${modifier.toFixed(2)}`;
}

function note() {
  const all = residency.bins.flat();
  if (!all.length) return;
  const neurons = Math.round(residency.neurons_per_bin * residency.bins[0].length);
  const text = `${residency.bins.length} layers × ${neurons} neurons · ${Math.round(mean(all))} % resident`;
  find('heat-note').textContent = text;
}

function point(event) {
  const { bins, neurons_per_bin: size } = residency;
  if (!bins.length) return;
  const box = event.target.getBoundingClientRect();
  const pick = (at, span, count) => Math.max(0, Math.min(count - 1, Math.floor((at / span) * count)));
  const layer = pick(event.clientY - box.top, box.height, bins.length);
  const bin = pick(event.clientX - box.left, box.width, bins[0].length);
  const [from, to] = [Math.floor(bin * size), Math.floor((bin + 1) * size) - 1];
  const range = to > from ? `neurons ${from} to ${to}` : `neuron ${from}`;
  find('heat-note').textContent = `layer ${layer}, ${range}: ${bins[layer][bin]} % resident`;
}

const megabytes = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(0)} MB`);

export function showProps(props) {
  const { budget } = props;
  const whole = Math.max(budget.limit ?? 0, budget.total);
  const parts = PARTS.map(([name, text], i) => [text, budget[name], `part-${i + 1}`]).filter(([, size]) => size);
  find('budget-bar').replaceChildren(
    ...parts.map(([, size, name]) => {
      const piece = element('span');
      piece.style.width = `${(100 * size) / whole}%`;
      piece.style.background = `var(--${name})`;
      return piece;
    }),
  );
  const rows = parts.map(([text, size, name]) => entry(name, text, megabytes(size)));
  const limit = budget.limit ? ` of ${megabytes(budget.limit)}` : '';
  rows.push(entry('line', 'in all', `${megabytes(budget.total)}${limit}`));
  find('legend-budget').replaceChildren(...rows);
  find('about').textContent = props.description.replaceAll(' | ', ' · ');
}

// Calls ``seen`` with each answer, or with the error.
export function startLive(seen) {
  find('c-heat').addEventListener('pointermove', point);
  find('c-heat').addEventListener('pointerleave', note);
  async function poll() {
    if (!document.hidden) {
      try {
        const live = await getJson(`/live?since=${since}`);
        append(live.steps);
        residency = live.residency;
        numbers(live);
        if (!find('c-heat').matches(':hover')) note();
        draw();
        seen(live, null);
      } catch (error) {
        seen(null, error);
      }
    }
    setTimeout(poll, POLL_MS);
  }
  poll();
}
