// Puts the page together: status, views, theme.
import { getJson } from './api.js';
import { setModel, startChat } from './chat.js';
import { draw, showProps, startLive } from './live.js';
import { openSettings, showDefaults, startSettings } from './settings.js';

const find = (id) => document.getElementById(id);
const THEMES = { '': ['◐', 'as the system'], light: ['☀', 'light'], dark: ['☾', 'dark'] };
let known = false;
let asked = false;

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem('kairox.theme', theme);
  const [sign, name] = THEMES[theme];
  find('theme').textContent = sign;
  find('theme').setAttribute('aria-label', `Theme: ${name}`);
  find('theme').title = `Theme: ${name}`;
  draw();
}

function startTheme() {
  const saved = localStorage.getItem('kairox.theme') ?? '';
  setTheme(saved in THEMES ? saved : '');
  find('theme').addEventListener('click', () => {
    const names = Object.keys(THEMES);
    const now = document.documentElement.dataset.theme ?? '';
    setTheme(names[(names.indexOf(now) + 1) % names.length]);
  });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
}

function startViews() {
  for (const view of ['chat', 'live']) {
    find(`show-${view}`).addEventListener('click', () => {
      document.body.dataset.view = view;
      find('show-chat').setAttribute('aria-pressed', String(view === 'chat'));
      find('show-live').setAttribute('aria-pressed', String(view === 'live'));
      draw();
    });
  }
  window.addEventListener('resize', draw);
}

function status(state, text) {
  if (find('status').dataset.state === state && find('status-text').textContent === text) return;
  find('status').dataset.state = state;
  find('status-text').textContent = text;
}

async function seen(live, error) {
  if (error) {
    known = false;
    status('away', error.status ? error.message : 'the server cannot be reached');
    setModel({ ready: false, chat: true });
    if (error.status === 401 && !asked) {
      asked = true;
      openSettings('key');
    }
  } else if (live.state !== 'ready') {
    status('loading', live.state === 'loading' ? 'loading the model' : `the server is ${live.state}`);
    setModel({ ready: false, chat: true });
  } else if (!known) {
    known = true;
    const props = await getJson('/props');
    showProps(props);
    showDefaults(props.defaults);
    setModel({ ready: true, chat: props.chat });
    const policy = props.policy ? ` · ${props.policy}` : '';
    status('ready', `${props.model} · ${props.mode}${policy}`);
    document.title = `${props.model} · kairox`;
  }
}

startTheme();
startViews();
startSettings(() => {
  known = false;
});
startChat();
startLive((live, error) => seen(live, error).catch((problem) => status('away', problem.message)));
find('input').focus({ preventScroll: true });
