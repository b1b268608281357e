// Sampling settings, the system prompt and the key: kept in this browser, the key only for this tab.
import { getKey, setKey } from './api.js';

const STORE = 'kairox.settings';
const NUMBERS = ['temperature', 'max_tokens', 'top_p', 'top_k', 'min_p', 'seed'];
const dialog = document.getElementById('settings');
const form = dialog.querySelector('form');

function read() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function fill() {
  const saved = read();
  for (const name of [...NUMBERS, 'system']) form.elements[name].value = saved[name] ?? '';
  form.elements.key.value = getKey();
}

function save() {
  const values = Object.fromEntries([...NUMBERS, 'system'].map((name) => [name, form.elements[name].value]));
  localStorage.setItem(STORE, JSON.stringify(values));
  setKey(form.elements.key.value.trim());
}

// What goes into a request; a field that was left empty is the server's to decide.
export function sampling() {
  const saved = read();
  const given = NUMBERS.filter((name) => saved[name] && Number.isFinite(Number(saved[name])));
  return Object.fromEntries(given.map((name) => [name, Number(saved[name])]));
}

export const systemPrompt = () => read().system?.trim() ?? '';

export function openSettings(field) {
  fill();
  dialog.showModal();
  (form.elements[field] ?? form.elements.system).focus();
}

export function startSettings(changed) {
  document.getElementById('open-settings').addEventListener('click', () => openSettings());
  document.getElementById('reset-settings').addEventListener('click', () => {
    form.reset();
    for (const name of [...NUMBERS, 'system']) form.elements[name].value = '';
  });
  form.addEventListener('submit', () => {
    save();
    changed();
  });
}

export function showDefaults(defaults) {
  for (const name of NUMBERS) {
    if (defaults[name] !== undefined && defaults[name] !== null) {
      form.elements[name].placeholder = defaults[name];
    }
  }
}
