// A small part of Markdown as DOM nodes. Text stays text: nothing here parses markup.
const SAFE_LINK = /^(https?:|mailto:)/i;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|\*(?=\S)([^*]+?)\*|\[([^\]\n]+)\]\(([^()\s]+)\)/;

export function element(name, text = '', attributes = {}) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function inline(parent, text) {
  for (let rest = text; rest; ) {
    const found = INLINE.exec(rest);
    if (!found) {
      parent.append(rest);
      return parent;
    }
    const [whole, , code, bold, italic, label, target] = found;
    parent.append(rest.slice(0, found.index));
    if (code !== undefined) parent.append(element('code', code));
    else if (bold !== undefined) parent.append(inline(element('strong'), bold));
    else if (italic !== undefined) parent.append(inline(element('em'), italic));
    else if (SAFE_LINK.test(target)) {
      const link = { href: target, target: '_blank', rel: 'noopener noreferrer' };
      parent.append(element('a', label, link));
    } else parent.append(whole);
    rest = rest.slice(found.index + whole.length);
  }
  return parent;
}

function lines(parent, texts) {
  texts.forEach((text, i) => {
    if (i) parent.append(element('br'));
    inline(parent, text);
  });
  return parent;
}

const STARTS = [/^```/, /^#{1,6} /, /^\s*[-*+] /, /^\s*\d{1,9}[.)] /, /^> ?/, /^(-{3,}|\*{3,})\s*$/];
const begins = (line) => STARTS.some((start) => start.test(line));

function take(all, at, test) {
  let end = at;
  while (end < all.length && test(all[end], end)) end += 1;
  return end;
}

function list(name, marker, all, at) {
  const end = take(all, at, (line) => marker.test(line) || (/^\s{2,}\S/.test(line) && !/^```/.test(line.trim())));
  const made = element(name);
  for (const line of all.slice(at, end)) {
    if (marker.test(line)) made.append(inline(element('li'), line.replace(marker, '')));
    else {
      made.lastChild.append(' ');
      inline(made.lastChild, line.trim());
    }
  }
  if (name === 'ol' && parseInt(all[at], 10) !== 1) made.start = parseInt(all[at], 10);
  return [made, end];
}

function codeBlock(all, at) {
  const end = take(all, at + 1, (line) => !/^```\s*$/.test(line));
  const block = element('div', '', { class: 'block' });
  const pre = element('pre', '', { tabindex: '0' });
  pre.append(element('code', all.slice(at + 1, end).join('\n')));
  block.append(pre, element('button', 'Copy', { type: 'button', class: 'quiet copy' }));
  return [block, end + 1];
}

// Returns the nodes of a text.
export function render(text) {
  const all = text.replace(/\r\n?/g, '\n').split('\n');
  const nodes = [];
  for (let at = 0; at < all.length; ) {
    const line = all[at];
    let made;
    let end = at + 1;
    if (!line.trim()) {
      at += 1;
      continue;
    }
    if (/^```/.test(line)) [made, end] = codeBlock(all, at);
    else if (/^#{1,6} /.test(line)) {
      const level = Math.min(line.indexOf(' ') + 2, 6); // the page has h1 and h2 of its own
      made = inline(element(`h${level}`), line.replace(/^#+ /, ''));
    } else if (STARTS[5].test(line)) made = element('hr');
    else if (STARTS[2].test(line)) [made, end] = list('ul', STARTS[2], all, at);
    else if (STARTS[3].test(line)) [made, end] = list('ol', STARTS[3], all, at);
    else if (STARTS[4].test(line)) {
      end = take(all, at, (other) => STARTS[4].test(other));
      made = lines(element('blockquote'), all.slice(at, end).map((other) => other.replace(STARTS[4], '')));
    } else {
      end = take(all, at + 1, (other) => other.trim() && !begins(other));
      made = lines(element('p'), all.slice(at, end));
    }
    nodes.push(made);
    at = end;
  }
  return nodes;
}
