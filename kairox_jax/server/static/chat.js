// The conversation: sends it, shows the answer as it comes, stops, copies.
import { ApiError, stream } from './api.js';
import { element, render } from './markdown.js';
import { openSettings, sampling, systemPrompt } from './settings.js';

const find = (id) => document.getElementById(id);
const [list, scroll, input, send, stop] = ['messages', 'scroll', 'input', 'send', 'stop'].map(find);
const turns = [];
let running = null;
let canChat = true;

export function setModel({ ready, chat }) {
  canChat = chat;
  send.disabled = !ready;
  if (!chat) {
    find('empty').querySelector('h2').textContent = 'Continue a text';
    find('empty-text').textContent = 'This model has no chat template: each message is continued as it stands.';
  }
}

export function startChat() {
  find('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    if (!running && !send.disabled && input.value.trim()) answer(input.value);
  });
  input.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      find('composer').requestSubmit();
    }
  });
  input.addEventListener('input', grow);
  stop.addEventListener('click', () => running?.abort());
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && !find('settings').open) running?.abort();
  });
  find('new-chat').addEventListener('click', () => {
    running?.abort();
    turns.length = 0;
    list.replaceChildren();
    find('empty').hidden = false;
    input.focus();
  });
  list.addEventListener('click', (event) => {
    if (event.target.matches('.block .copy')) {
      copy(event.target.parentNode.querySelector('code').textContent, event.target);
    }
  });
}

function grow() {
  input.style.height = 'auto';
  input.style.height = `${input.scrollHeight}px`;
}

function request(text) {
  if (!canChat) return ['/v1/completions', { prompt: text, max_tokens: 256, ...sampling() }];
  const system = systemPrompt() ? [{ role: 'system', content: systemPrompt() }] : [];
  return ['/v1/chat/completions', { messages: [...system, ...turns], ...sampling() }];
}

async function answer(text) {
  find('empty').hidden = true;
  list.append(element('li', text, { class: 'user' }));
  turns.push({ role: 'user', content: text });
  input.value = '';
  grow();
  const shown = new Answer();
  list.append(shown.item);
  toEnd(true);
  setRunning(new AbortController());
  try {
    const [path, body] = request(text);
    for await (const event of stream(path, body, running.signal)) shown.take(event);
    shown.end();
  } catch (error) {
    shown.end(error.name === 'AbortError' ? 'stopped' : '');
    if (error.name !== 'AbortError') fail(error, shown);
  } finally {
    setRunning(null);
  }
  if (shown.text) turns.push({ role: 'assistant', content: shown.text });
  else turns.pop(); // a question without an answer is not part of the conversation
  toEnd();
}

function fail(error, shown) {
  if (!shown.text) shown.item.remove();
  const offline = error instanceof ApiError ? '' : 'The server cannot be reached. ';
  list.append(element('li', `${offline}${error.message}`, { class: 'failed', role: 'alert' }));
  if (error.status === 401) openSettings('key');
}

function setRunning(controller) {
  running = controller;
  send.hidden = Boolean(controller);
  stop.hidden = !controller;
  list.setAttribute('aria-busy', String(Boolean(controller)));
  input.focus({ preventScroll: true });
}

function toEnd(always = false) {
  const near = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 120;
  if (always || near) scroll.scrollTop = scroll.scrollHeight;
}

class Answer {
  constructor() {
    this.item = element('li', '', { class: 'busy' });
    this.body = element('div', '', { class: 'text' });
    this.item.append(this.body);
    this.text = '';
    this.tokens = 0;
    this.pending = false;
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    const piece = choice?.delta?.content ?? choice?.text ?? '';
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (!piece) return;
    this.first ??= performance.now();
    this.last = performance.now();
    this.tokens += 1;
    this.text += piece;
    if (this.pending) return;
    this.pending = true; // once a frame, however fast tokens come
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    this.body.replaceChildren(...render(this.text));
    toEnd();
  }

  end(note = '') {
    this.draw();
    this.item.classList.remove('busy');
    const foot = element('div', '', { class: 'foot' });
    const button = element('button', 'Copy', { type: 'button', class: 'quiet' });
    button.addEventListener('click', () => copy(this.text, button));
    foot.append(button, element('span', this.facts(note)));
    this.item.append(foot);
  }

  facts(note) {
    const count = this.usage?.completion_tokens ?? this.tokens;
    const seconds = (this.last - this.first) / 1000;
    const parts = [`${count} token${count === 1 ? '' : 's'}`];
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    const reused = this.usage?.prompt_tokens_details?.cached_tokens;
    if (reused) parts.push(`${reused} of ${this.usage.prompt_tokens} prompt tokens reused`);
    if (this.reason === 'length') parts.push('cut off at the limit');
    if (note) parts.push(note);
    return parts.join(' · ');
  }
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element('textarea'); // without https a browser has no clipboard to offer
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  const before = button.textContent;
  button.textContent = 'Copied';
  setTimeout(() => {
    button.textContent = before;
  }, 1200);
}
