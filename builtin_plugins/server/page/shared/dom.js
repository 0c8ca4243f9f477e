// Elements of the page. Text from a server only ever becomes text nodes: nothing here parses HTML.

/** Return the element of an id that the page has. */
export function byId(id) {
  return document.getElementById(id);
}

/** Return a new element; an attribute that is false, null or undefined is left out. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return a button that calls a function. */
export function button(label, action, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, label);
  node.addEventListener("click", action);
  return node;
}

/** Return an id that nothing on the page has yet. */
export function newId(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

let counter = 0;
