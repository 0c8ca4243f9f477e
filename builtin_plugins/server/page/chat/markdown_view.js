// Shows Markdown that grows: blocks that did not change keep their elements, and a reader's selection.

import { button, element } from "../shared/dom.js";
import { codeParts } from "./highlight.js";
import { parseBlocks } from "./markdown.js";

const INLINE_TAGS = { strong: "strong", emphasis: "em", deleted: "del" };

/** The elements of a text. */
export class MarkdownView {
  #root;
  #shown = [];

  /** Show texts inside an element. */
  constructor(root) {
    this.#root = root;
  }

  /** Show a text in place of the last one. */
  update(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < blocks.length && this.#shown[same]?.source === blocks[same].source) same += 1;
    for (const old of this.#shown.splice(same)) old.node.remove();
    const headings = { ...(this.#shown.at(-1)?.headings ?? { first: null, last: 2 }) };
    for (const block of blocks.slice(same)) {
      const node = blockNode(block, headings);
      this.#root.append(node);
      this.#shown.push({ source: block.source, node, headings: { ...headings } });
    }
  }
}

function blockNode(block, headings) {
  switch (block.type) {
    case "code":
      return codeNode(block);
    case "heading":
      return headingNode(block, headings);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...block.blocks.map((inner) => blockNode(inner, headings)));
    case "list":
      return listNode(block, headings);
    case "table":
      return tableNode(block);
    default:
      return element("p", {}, ...inlineNodes(block.parts));
  }
}

/**
 * Return a heading. Above an answer, the page has one of level 2: the first one of the answer is of
 * level 3, the others as far from it as they were written, and none skips a level.
 */
function headingNode({ level, parts }, headings) {
  headings.first ??= level;
  headings.last = Math.max(3, Math.min(3 + level - headings.first, headings.last + 1, 6));
  return element(`h${headings.last}`, {}, ...inlineNodes(parts));
}

function codeNode({ text, language }) {
  const label = language ? `${language} code` : "Code";
  const code = element("pre", { tabindex: "0", role: "region", "aria-label": label });
  const parts = codeParts(text, language ?? "");
  const nodes = parts.map(([kind, part]) => (kind === null ? part : element("span", { class: `code-${kind}` }, part)));
  code.append(element("code", {}, ...nodes));
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"));
  head.append(copyButton(() => text, "Copy code"));
  return element("div", { class: "code-block" }, head, code);
}

/** Return a button that copies a text, and says so. */
export function copyButton(textOf, label) {
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(textOf());
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => {
      copy.textContent = "Copy";
    }, 1500);
  }, { class: "quiet", "aria-label": label });
  return copy;
}

function listNode({ start, items }, headings) {
  const tag = start === null ? "ul" : "ol";
  const list = element(tag, { start: start !== null && start !== 1 ? start : null });
  for (const blocks of items) {
    const [first, ...rest] = blocks;
    // An item that is one line is no paragraph.
    const isPlain = first?.type === "paragraph";
    const nodes = isPlain ? inlineNodes(first.parts) : first ? [blockNode(first, headings)] : [];
    list.append(element("li", {}, ...nodes, ...rest.map((block) => blockNode(block, headings))));
  }
  return list;
}

function tableNode({ head, rows }) {
  const cells = (row, tag) => row.map((parts) => {
    return element(tag, { scope: tag === "th" ? "col" : null }, ...inlineNodes(parts));
  });
  const table = element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...cells(head, "th"))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td")))),
  );
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function inlineNodes(parts) {
  return parts.map((part) => {
    if (typeof part === "string") return document.createTextNode(part);
    if (part.type === "code") return element("code", {}, part.text);
    if (part.type === "break") return element("br");
    if (part.type === "link") return linkNode(part);
    return element(INLINE_TAGS[part.type], {}, ...inlineNodes(part.parts));
  });
}

function linkNode({ url, parts }) {
  const attributes = { href: url, title: url, target: "_blank", rel: "noopener noreferrer" };
  return element("a", attributes, ...inlineNodes(parts));
}
