// Fields made of JSON schemas. What a field cannot express is asked for as JSON.

import { element, newId } from "../shared/dom.js";

const DEEPEST_REFERENCE = 8;

/** A value that somebody wrote and that cannot be sent; `input` is where. */
export class FieldError extends Error {
  /** Make an error. */
  constructor(message, input) {
    super(message);
    this.input = input;
  }
}

/** Return a schema without references and without the alternative null; null if it is unclear. */
export function plainSchema(schema, root, depth = 0) {
  if (schema === null || typeof schema !== "object" || depth > DEEPEST_REFERENCE) return null;
  if (typeof schema.$ref === "string") {
    const { $ref, ...beside } = schema;
    const target = plainSchema(pointed($ref, [schema, ...[root].flat()]), root, depth + 1);
    return target === null ? null : { ...target, ...beside };
  }
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices !== undefined) {
    const others = choices.filter((choice) => choice?.type !== "null");
    if (others.length !== 1) return null;
    const { anyOf, oneOf, ...beside } = schema;
    const target = plainSchema(others[0], root, depth + 1);
    return target === null ? null : { ...target, ...beside };
  }
  if (Array.isArray(schema.type)) {
    const types = schema.type.filter((type) => type !== "null");
    return types.length === 1 ? { ...schema, type: types[0] } : null;
  }
  return schema;
}

function pointed(reference, roots) {
  if (!reference.startsWith("#/")) return null;
  const names = reference.slice(2).split("/").map((n) => n.replaceAll("~1", "/").replaceAll("~0", "~"));
  for (const root of roots) {
    const found = names.reduce((value, name) => {
      return value !== null && typeof value === "object" && Object.hasOwn(value, name) ? value[name] : null;
    }, root);
    if (found !== null) return found;
  }
  return null;
}

/** Return `{node, input, read}` of a value; `read` returns undefined while nothing is written. */
export function makeField(name, schema, { label = name, root = null } = {}) {
  const known = plainSchema(schema, root) ?? {};
  const { input, read } = inputOf(known, label);
  input.id = newId("field");
  input.name = name;
  const words = [known.description ?? schema?.description, rangeOf(known)].filter(Boolean).join(" ");
  const node = element("div", { class: "field" }, element("label", { for: input.id }, label), input);
  if (words !== "") {
    const hint = element("p", { class: "hint", id: `${input.id}-hint` }, words);
    input.setAttribute("aria-describedby", hint.id);
    node.append(hint);
  }
  node.classList.toggle("wide", input.tagName === "TEXTAREA");
  input.addEventListener("input", () => input.removeAttribute("aria-invalid"));
  return { node, input, read: () => checked(read, input) };
}

function checked(read, input) {
  try {
    return read();
  } catch (error) {
    input.setAttribute("aria-invalid", "true");
    throw error;
  }
}

function inputOf(schema, label) {
  const hint = String(schema.default ?? "default");
  if (Array.isArray(schema.enum)) return choiceInput(schema.enum.filter((v) => v !== null), schema);
  switch (schema.type) {
    case "boolean":
      return choiceInput([true, false], schema);
    case "integer":
    case "number":
      return numberInput(schema, label, hint);
    case "string":
      return textInput(hint);
    case "array":
      if (["string", "integer", "number"].includes(schema.items?.type)) {
        return linesInput(schema.items.type, label);
      }
      return jsonInput(label, "[ ]");
    default:
      return jsonInput(label, schema.type === "object" ? "{ }" : "JSON");
  }
}

function choiceInput(values, schema) {
  const words = (value) => (value === true ? "yes" : value === false ? "no" : String(value));
  const options = values.map((value, index) => element("option", { value: index }, words(value)));
  const isKnown = (schema.default ?? null) !== null;
  const hint = isKnown ? `default: ${words(schema.default)}` : "default";
  const input = element("select", {}, element("option", { value: "" }, hint), ...options);
  return { input, read: () => (input.value === "" ? undefined : values[Number(input.value)]) };
}

function numberInput(schema, label, hint) {
  const isWhole = schema.type === "integer";
  const input = element("input", {
    type: "text",
    inputmode: isWhole ? "numeric" : "decimal",
    autocomplete: "off",
    placeholder: hint,
  });
  return {
    input,
    read() {
      const text = input.value.trim();
      return text === "" ? undefined : numberOf(text, schema, label, input);
    },
  };
}

function numberOf(text, schema, label, input) {
  const value = Number(text);
  const isWhole = schema.type === "integer";
  if (!Number.isFinite(value) || (isWhole && !Number.isSafeInteger(value))) {
    throw new FieldError(`${label}: expected a ${isWhole ? "whole " : ""}number, got “${text}”.`, input);
  }
  const tooSmall =
    value < (schema.minimum ?? -Infinity) || value <= (schema.exclusiveMinimum ?? -Infinity);
  const tooLarge = value > (schema.maximum ?? Infinity) || value >= (schema.exclusiveMaximum ?? Infinity);
  if (tooSmall || tooLarge) throw new FieldError(`${label} is ${text}. Expected: ${rangeOf(schema)}`, input);
  return value;
}

function rangeOf({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  if (minimum !== undefined && maximum !== undefined) return `${minimum} to ${maximum}.`;
  const words = [];
  if (minimum !== undefined) words.push(`at least ${minimum}`);
  if (exclusiveMinimum !== undefined) words.push(`above ${exclusiveMinimum}`);
  if (maximum !== undefined) words.push(`at most ${maximum}`);
  if (exclusiveMaximum !== undefined) words.push(`below ${exclusiveMaximum}`);
  const text = words.join(", ");
  return text === "" ? "" : `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function textInput(hint) {
  const input = element("input", { type: "text", autocomplete: "off", placeholder: hint });
  return { input, read: () => (input.value === "" ? undefined : input.value) };
}

function linesInput(type, label) {
  const input = element("textarea", { rows: 2, placeholder: "one per line", spellcheck: "false" });
  return {
    input,
    read() {
      const lines = input.value.split("\n").filter((line) => line !== "");
      if (lines.length === 0) return undefined;
      return type === "string" ? lines : lines.map((line) => numberOf(line, { type }, label, input));
    },
  };
}

function jsonInput(label, hint) {
  const input = element("textarea", { rows: 3, class: "code", placeholder: hint, spellcheck: "false" });
  return {
    input,
    read() {
      if (input.value.trim() === "") return undefined;
      try {
        return JSON.parse(input.value);
      } catch {
        throw new FieldError(`${label}: this is not JSON.`, input);
      }
    },
  };
}

/** Return `{node, inputs, read}` of an object: a field for each property, or one of JSON. */
export function makeObjectForm(name, schema, root) {
  const known = plainSchema(schema, [schema, root].filter(Boolean));
  const roots = [schema, root].filter(Boolean);
  const hasParts = known?.type === "object" && Object.keys(known.properties ?? {}).length > 0;
  if (!hasParts) {
    const field = makeField(name, known ?? schema, { root: roots });
    return { node: field.node, fields: { [name]: field }, read: field.read };
  }
  const fields = {};
  for (const [part, partSchema] of Object.entries(known.properties)) {
    fields[part] = makeField(part, partSchema, { root: roots });
  }
  const node = element("div", { class: "fields" }, ...Object.values(fields).map((field) => field.node));
  const read = () => {
    const values = Object.entries(fields).map(([part, field]) => [part, field.read()]);
    const given = values.filter(([, value]) => value !== undefined);
    return given.length > 0 ? Object.fromEntries(given) : undefined;
  };
  return { node, fields, read };
}
