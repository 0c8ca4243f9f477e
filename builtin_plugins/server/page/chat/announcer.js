// Says streamed text to screen readers in sentences: token by token, nobody could follow.

import { element } from "../shared/dom.js";

const SENTENCE_END = /[.!?…:;]["')\]]*\s|[。！？]|\n/gu;
const MOST_LINES = 40;
const SECONDS_BETWEEN = 1.5;

/** Speaks through a live region of the page. */
export class Announcer {
  #region;
  #spoken = 0;
  #lastTime = 0;

  /** Use a region with `aria-live`. */
  constructor(region) {
    this.#region = region;
  }

  /** Say one thing. */
  say(text) {
    const line = text
      .replaceAll(/\[([^\]\n]{1,200})\]\([^()\s]{1,500}\)/g, "$1") // A link is its label.
      .replaceAll(/[*_`#|]+/g, " ")
      .replaceAll(/\s+/g, " ")
      .trim();
    if (line === "") return;
    this.#region.append(element("p", {}, line));
    while (this.#region.childElementCount > MOST_LINES) this.#region.firstElementChild.remove();
  }

  /** Start with a new answer. */
  begin() {
    this.#region.replaceChildren();
    this.#spoken = 0;
    this.#lastTime = 0;
  }

  /** Say the sentences that an answer, as far as it came, holds beyond those already said. */
  update(answer) {
    const now = performance.now() / 1000;
    if (now - this.#lastTime < SECONDS_BETWEEN) return;
    const ends = [...answer.slice(this.#spoken).matchAll(SENTENCE_END)];
    if (ends.length === 0) return;
    const last = ends.at(-1);
    const end = this.#spoken + last.index + last[0].length;
    this.say(answer.slice(this.#spoken, end));
    this.#spoken = end;
    this.#lastTime = now;
  }

  /** Say the rest of an answer. */
  finish(answer) {
    this.say(answer.slice(this.#spoken));
    this.#spoken = answer.length;
  }
}
