// Requests to the server this page came from: JSON, and the events of a stream.
const KEY = 'kairox.key';

export const getKey = () => sessionStorage.getItem(KEY) ?? '';
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = () => (getKey() ? { Authorization: `Bearer ${getKey()}` } : {});

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new ApiError(response.status, body?.error?.message ?? `the server answered ${response.status}`);
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers(), cache: 'no-store' });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Yields the events of a streamed answer; throws ApiError, also for an error in the middle.
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: 'POST',
    headers: { ...headers(), 'Content-Type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, 'the connection ended before the answer did');
    const parts = (pending + value).split('\n\n');
    pending = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, '');
      if (data === '[DONE]') return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error.message);
      yield event;
    }
  }
}
