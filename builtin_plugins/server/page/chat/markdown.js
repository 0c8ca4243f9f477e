// The part of Markdown that models write, as data. Every loop is bounded by the length of the text.

const DEEPEST = 6;
const LONGEST_LABEL = 500;
const LONGEST_URL = 2000;
const ESCAPABLE = "\\`*_{}[]()#+-.!|~>";
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])(?: (.*)|)$/;

/** Return the blocks of a text, each with the `source` that it was made of. */
export function parseBlocks(text, depth = 0) {
  const lines = text.split(/\r\n|\n|\r/);
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const { end, ...block } = blockAt(lines, at, depth);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  let match = FENCE.exec(line);
  if (match !== null && !(match[1][0] === "`" && match[2].includes("`"))) {
    return fenceAt(lines, at, match);
  }
  match = HEADING.exec(line);
  if (match !== null) {
    const content = match[2].replace(/ #+ *$/, "");
    return { type: "heading", level: match[1].length, parts: parseInline(content), end: at + 1 };
  }
  if (RULE.test(line)) return { type: "rule", end: at + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, at, depth);
  if (isTable(lines, at)) return tableAt(lines, at);
  return paragraphAt(lines, at, depth);
}

function fenceAt(lines, at, [, marker, info]) {
  const closing = (line) => {
    const found = line.trim();
    return found.length >= marker.length && found === marker[0].repeat(found.length);
  };
  let end = at + 1;
  while (end < lines.length && !closing(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const language = info.trim().split(/\s/, 1)[0].slice(0, 40);
  return { type: "code", text, language, end: Math.min(end + 1, lines.length) };
}

function quoteAt(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const match = QUOTE.exec(lines[end]);
    if (match === null) break;
    inner.push(match[1]);
  }
  return { type: "quote", blocks: parseBlocks(inner.join("\n"), depth + 1), end };
}

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const indent = first[1].length;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (match !== null && match[1].length <= indent + 1 && !RULE.test(lines[end])) {
      if (/\d/.test(match[2]) !== ordered || match[1].length < indent) break;
      items.push([match[3] ?? ""]);
    } else if (!belongsToItem(lines, end, indent)) {
      break;
    } else {
      items.at(-1).push(lines[end].replace(new RegExp(`^ {0,${indent + first[2].length + 1}}`), ""));
    }
    end += 1;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : null;
  const blocks = items.map((item) => parseBlocks(item.join("\n"), depth + 1));
  return { type: "list", start, items: blocks, end };
}

/** Return whether a line goes on with an item: it is indented, or follows its text directly. */
function belongsToItem(lines, at, indent) {
  const isIndented = (line) => line.startsWith(" ".repeat(indent + 2));
  if (lines[at].trim() === "") {
    const next = lines[at + 1];
    return next !== undefined && (isIndented(next) || ITEM.test(next));
  }
  if (isIndented(lines[at])) return true;
  return lines[at - 1].trim() !== "" && !startsBlock(lines[at]);
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function isTable(lines, at) {
  const next = lines[at + 1];
  if (!lines[at].includes("|") || next === undefined || !next.includes("-")) return false;
  return cellsOf(next).every((cell) => /^:?-+:?$/.test(cell));
}

function tableAt(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const [head, , ...rows] = lines.slice(at, end).map((line) => cellsOf(line).map((c) => parseInline(c)));
  const width = head.length;
  return { type: "table", head, rows: rows.map((row) => row.slice(0, width)), end };
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/([^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraphAt(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "") {
    if (depth < DEEPEST && startsBlock(lines[end])) break;
    if (isTable(lines, end)) break;
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { type: "paragraph", parts: parseInline(text), end };
}

/** Return the parts of a text inside a block: strings, and objects for all that is marked. */
export function parseInline(text, depth = 0) {
  const parts = [];
  const missing = new Set(); // Marks that never close from here on: not looked for again.
  let plain = "";
  let at = 0;
  const put = (part, next) => {
    if (plain !== "") parts.push(plain);
    if (part !== null) parts.push(part);
    plain = "";
    at = next;
  };
  while (at < text.length) {
    const found = partAt(text, at, depth, missing);
    if (found === null) {
      plain += text[at];
      at += 1;
    } else if (typeof found.part === "string") {
      plain += found.part;
      at = found.next;
    } else {
      put(found.part, found.next);
    }
  }
  put(null, at);
  return parts;
}

function partAt(text, at, depth, missing) {
  switch (text[at]) {
    case "\n":
      return { part: { type: "break" }, next: at + 1 };
    case "\\":
      if (at + 1 === text.length || !ESCAPABLE.includes(text[at + 1])) return null;
      return { part: text[at + 1], next: at + 2 };
    case "`":
      return codeAt(text, at, missing);
    case "*":
    case "_":
    case "~":
      return depth < DEEPEST ? markedAt(text, at, depth, missing) : null;
    case "!":
      return text[at + 1] === "[" ? linkAt(text, at + 1, DEEPEST) : null;
    case "[":
      return depth < DEEPEST ? linkAt(text, at, depth) : null;
    case "h":
      return addressAt(text, at);
    default:
      return null;
  }
}

function codeAt(text, at, missing) {
  let length = 1;
  while (text[at + length] === "`") length += 1;
  const mark = "`".repeat(length);
  const start = at + length;
  let end = missing.has(mark) ? -1 : text.indexOf(mark, start);
  while (end !== -1 && text[end + length] === "`") {
    let next = end;
    while (text[next] === "`") next += 1;
    end = text.indexOf(mark, next);
  }
  if (end === -1) {
    missing.add(mark);
    return { part: mark, next: start };
  }
  const inner = text.slice(start, end).replaceAll("\n", " ");
  const isPadded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
  return { part: { type: "code", text: isPadded ? inner.slice(1, -1) : inner }, next: end + length };
}

const MARKS = { "**": "strong", __: "strong", "~~": "deleted", "*": "emphasis", _: "emphasis" };

function markedAt(text, at, depth, missing) {
  const twice = text.slice(at, at + 2);
  const mark = twice in MARKS ? twice : text[at];
  const start = at + mark.length;
  const opens =
    mark in MARKS && !missing.has(mark) && start < text.length && !isSpace(text[start]) &&
    !(mark[0] === "_" && isWord(text[at - 1]));
  const end = opens ? closingMark(text, start, mark) : -1;
  if (end === -1) {
    if (opens) missing.add(mark);
    return { part: mark, next: start };
  }
  const parts = parseInline(text.slice(start, end), depth + 1);
  return { part: { type: MARKS[mark], parts }, next: end + mark.length };
}

function closingMark(text, start, mark) {
  let at = text.indexOf(mark, start);
  while (at !== -1) {
    const after = text[at + mark.length];
    if (mark.length === 1 && after === mark) {
      at = text.indexOf(mark, at + 2);
      continue;
    }
    if (at > start && !isSpace(text[at - 1]) && !(mark[0] === "_" && isWord(after))) return at;
    at = text.indexOf(mark, at + mark.length);
  }
  return -1;
}

function isSpace(character) {
  return character === " " || character === "\n" || character === "\t";
}

function isWord(character) {
  return character !== undefined && /[\p{L}\p{N}]/u.test(character);
}

function linkAt(text, at, depth) {
  const near = text.slice(at, at + LONGEST_LABEL);
  const middle = near.indexOf("](");
  if (middle < 1) return null;
  const start = at + middle + 2;
  let open = 1;
  let end = start;
  for (; end < text.length && end - start < LONGEST_URL; end += 1) {
    if (isSpace(text[end])) return null;
    if (text[end] === "(") open += 1;
    if (text[end] === ")") open -= 1;
    if (open === 0) break;
  }
  if (open !== 0) return null;
  const url = safeUrl(text.slice(start, end));
  if (url === null) return null;
  const label = text.slice(at + 1, at + middle);
  const parts = depth < DEEPEST ? parseInline(label, DEEPEST) : [label || url];
  return { part: { type: "link", url, parts }, next: end + 1 };
}

function addressAt(text, at) {
  if (isWord(text[at - 1])) return null;
  const match = /^https?:\/\/[^\s<>"'`*\]]+/.exec(text.slice(at, at + LONGEST_URL));
  if (match === null) return null;
  const address = match[0].replace(/[.,;:!?)]+$/, "");
  const url = safeUrl(address);
  return url === null ? null : { part: { type: "link", url, parts: [address] }, next: at + address.length };
}

/** Return a URL that a link may lead to, or null: no script, no file, nothing on this server. */
export function safeUrl(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}
