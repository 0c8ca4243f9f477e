// The messages of a conversation as the page shows them.

import { button, element, newId } from "../shared/dom.js";
import { imageList } from "./images.js";
import { copyButton, MarkdownView } from "./markdown_view.js";

/** Why an answer ended before its end, in words. */
export const ENDS = {
  length: "Cut off: it reached the most tokens it may have.",
  abort: "The server ended it.",
  stopped: "You stopped it.",
  error: "It failed.",
  repetition: "Ended because it repeated itself.",
  timeout: "Ended because its time was over.",
};

/** Return the element of a user's message with the URLs of its images; `onEdit` gets the new text. */
export function userMessage(text, urls, onEdit) {
  const body = element("div", { class: "body plain" }, text);
  body.hidden = text === "";
  const actions = element("div", { class: "actions" }, text === "" ? null : copyButton(() => text, "Copy message"));
  const node = element(
    "li",
    { class: "message user" },
    element("h2", { class: "hidden-text" }, "You"),
    imageList(urls),
    body,
    actions,
  );
  const edit = button("Edit", () => {
    const form = editForm(text, urls.length > 0, onEdit, () => {
      form.replaceWith(body);
      actions.hidden = false;
      edit.focus();
    });
    body.replaceWith(form);
    actions.hidden = true;
    form.querySelector("textarea").focus();
  }, { class: "quiet last-only", "aria-label": "Edit message" });
  actions.append(edit);
  return node;
}

function editForm(text, mayBeEmpty, onEdit, onCancel) {
  const id = newId("edit");
  const field = element("textarea", { id, rows: Math.min(text.split("\n").length + 1, 12) });
  field.value = text;
  const form = element(
    "form",
    { class: "edit" },
    element("label", { for: id, class: "hidden-text" }, "Edit your message"),
    field,
    element(
      "div",
      { class: "row" },
      element("button", { type: "submit", class: "primary" }, "Send again"),
      button("Cancel", onCancel),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (mayBeEmpty || field.value.trim() !== "") onEdit(field.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") onCancel();
  });
  return form;
}

/** Return the element of the results of tools. */
export function resultMessage(results) {
  const node = element("li", { class: "message tool" }, element("h2", { class: "hidden-text" }, "Results"));
  for (const { name, content } of results) {
    const text = element("pre", {}, element("code", {}, content));
    node.append(element("details", {}, element("summary", {}, `Result of ${name}`), text));
  }
  return node;
}

const MOST_POSITIONS = 500;

/** Return the folded table of the log-probabilities of an answer; an empty text without any. */
function probabilities(positions) {
  if (positions.length === 0) return "";
  const rows = positions.slice(0, MOST_POSITIONS).map(({ token, logprob, top_logprobs: top }) => {
    const others = top.filter((one) => one.token !== token);
    const words = others.map((one) => `${JSON.stringify(one.token)} ${percent(one.logprob)}`);
    const cells = [JSON.stringify(token), percent(logprob), words.join(", ")];
    return element("tr", { class: logprob < UNLIKELY ? "unlikely" : null }, ...cells.map((text) => element("td", {}, text)));
  });
  const heads = ["Token", "Probability", "Instead of"].map((text) => element("th", { scope: "col" }, text));
  const table = element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rows),
  );
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Probabilities" }, table);
  const left = positions.length - rows.length;
  const rest = left > 0 ? element("p", { class: "hint" }, `${left} more are not shown.`) : null;
  const summary = element("summary", {}, "Probabilities of the tokens");
  return element("details", { class: "probabilities" }, summary, scroll, rest);
}

const UNLIKELY = Math.log(0.5);

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} %`;
}

/** An answer that grows. */
export class AnswerView {
  #thinking;
  #thinkingText;
  #thinkingLabel;
  #markdown;
  #calls;
  #shownCalls = [];
  #waiting;
  #foot;
  #isDrawing = false;
  #answer = null;

  /** Make an empty one. */
  constructor() {
    this.#thinkingLabel = element("summary", {}, "Thinking…");
    this.#thinkingText = element("div", { class: "plain" });
    this.#thinking = element("details", { class: "thinking", hidden: true }, this.#thinkingLabel);
    this.#thinking.append(this.#thinkingText);
    const body = element("div", { class: "body" });
    this.#markdown = new MarkdownView(body);
    this.#calls = element("div", { class: "calls" });
    this.#waiting = element("p", { class: "waiting" }, "Waiting for the first token…");
    this.#foot = element("div", { class: "foot" });
    this.node = element(
      "li",
      { class: "message answer" },
      element("h2", { class: "hidden-text" }, "Answer"),
      this.#waiting,
      this.#thinking,
      body,
      this.#calls,
      this.#foot,
    );
    this.node.setAttribute("aria-busy", "true");
  }

  /** Show an answer as far as it came, with the next picture that the browser draws. */
  update(answer) {
    this.#answer = answer;
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    requestAnimationFrame(() => {
      this.#isDrawing = false;
      this.#draw();
      this.node.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
    });
  }

  #draw() {
    const { reasoning, content, calls } = this.#answer;
    this.#waiting.hidden = reasoning !== "" || content !== "" || calls.length > 0;
    this.#thinking.hidden = reasoning === "";
    if (this.#thinkingText.textContent.length !== reasoning.length) {
      this.#thinkingText.textContent = reasoning;
    }
    this.#markdown.update(content);
    calls.forEach((call, index) => this.#drawCall(call, index));
  }

  #drawCall(call, index) {
    if (this.#shownCalls[index] === undefined) {
      const name = element("code", {});
      const text = element("code", {});
      const code = element("pre", { tabindex: "0", role: "region", "aria-label": "Arguments" }, text);
      const box = element("div", { class: "call" }, element("p", {}, "Calls ", name), code);
      this.#calls.append(box);
      this.#shownCalls[index] = { box, name, text };
    }
    const { name, text } = this.#shownCalls[index];
    name.textContent = call.function.name;
    text.textContent = prettyJson(call.function.arguments);
  }

  /** Show that an answer is complete, or why it is not. */
  finish(answer, { note = "", error = null, actions = [] } = {}) {
    this.#answer = answer;
    this.#draw();
    this.#waiting.hidden = true;
    this.node.setAttribute("aria-busy", "false");
    this.#thinkingLabel.textContent = thoughtWords(answer);
    const words = [ENDS[answer.finishReason], answer.warning, answer.invalid].filter(Boolean);
    const problems = [...words, ...(error === null ? [] : [error])];
    this.#foot.replaceChildren(
      probabilities(answer.positions),
      ...problems.map((text) => element("p", { class: text === error ? "problem" : "notice" }, text)),
      element(
        "div",
        { class: "actions" },
        answer.content === "" ? null : copyButton(() => answer.content, "Copy answer"),
        ...actions,
        element("span", { class: "usage" }, note),
      ),
    );
  }

  /** Ask for the results of tools; `onResults` gets a text for each call. */
  askResults(calls, onResults) {
    const fields = calls.map((call, index) => {
      const id = newId("result");
      const field = element("textarea", { id, rows: 2, spellcheck: "false" });
      const label = element("label", { for: id }, `Result of ${call.function.name}`);
      this.#shownCalls[index].box.append(element("div", { class: "result" }, label, field));
      return field;
    });
    const submit = button("Send results", () => onResults(fields.map((field) => field.value)), {
      class: "primary send-results",
    });
    this.#calls.append(submit);
  }

  /** End asking for results. */
  settleResults() {
    for (const node of this.#calls.querySelectorAll(".result, .send-results")) node.remove();
  }
}

function thoughtWords({ thinkingSeconds }) {
  if (thinkingSeconds === null || thinkingSeconds < 1) return "Thinking";
  return `Thought for ${Math.round(thinkingSeconds)} s`;
}

/** Return JSON text with line breaks; a text that is no JSON yet as it is. */
export function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
