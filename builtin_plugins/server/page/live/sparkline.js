// A figure with the line of its last two minutes.

import { element } from "../shared/dom.js";

const SVG = "http://www.w3.org/2000/svg";
const MOST_POINTS = 120;
const WIDTH = 120;
const HEIGHT = 32;

/** One figure of the live view. */
export class Figure {
  #points = [];
  #now = element("p", { class: "now" }, "–");
  #beside = element("p", { class: "beside" });
  #line = shape("polyline");
  #area = shape("polygon");
  #highest;
  #words;

  /** Make it; `words` turns a number into text, `highest` is the top of the line, if that is fixed. */
  constructor(name, { words = String, highest = null } = {}) {
    this.#words = words;
    this.#highest = highest;
    const svg = shape("svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true"); // The text beside it says what it shows.
    svg.append(this.#area, this.#line);
    const label = element("p", { class: "name" }, name);
    this.node = element("li", { class: "figure" }, label, this.#now, this.#beside, svg);
  }

  /** Add a number; null is none, as before the second poll. */
  add(value, beside = null) {
    this.#now.textContent = value === null ? "–" : this.#words(value);
    if (value !== null) {
      this.#points.push(value);
      if (this.#points.length > MOST_POINTS) this.#points.shift();
    }
    const peak = Math.max(0, ...this.#points);
    this.#beside.textContent = beside ?? `highest ${this.#words(peak)}`;
    this.#draw(this.#highest ?? Math.max(peak, 1));
  }

  #draw(top) {
    const last = Math.max(this.#points.length - 1, 1);
    const points = this.#points.map((value, index) => {
      const x = (index / last) * WIDTH;
      const y = HEIGHT - 1 - (Math.min(value / top, 1) * (HEIGHT - 2));
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    this.#line.setAttribute("points", points.join(" "));
    const [end] = (points.at(-1) ?? "0").split(",");
    this.#area.setAttribute("points", [`0,${HEIGHT}`, ...points, `${end},${HEIGHT}`].join(" "));
  }
}

function shape(tag) {
  return document.createElementNS(SVG, tag);
}
