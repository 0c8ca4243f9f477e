// The form beside a conversation: system prompt, sampling, tools, and arguments of plugins.

import { forgetKey, hasKey, requestJson } from "../shared/api.js";
import { byId, element } from "../shared/dom.js";
import { FieldError, makeField, makeObjectForm } from "./schema_form.js";

const SAMPLING = [
  ["temperature", "Temperature", { type: "number", minimum: 0 }],
  ["max_tokens", "Max tokens", { type: "integer", minimum: 1 }],
  ["top_p", "Top p", { type: "number", exclusiveMinimum: 0, maximum: 1 }],
  ["top_k", "Top k", { type: "integer", minimum: 0 }],
  ["min_p", "Min p", { type: "number", minimum: 0, maximum: 1 }],
  ["seed", "Seed", { type: "integer" }],
  ["presence_penalty", "Presence penalty", { type: "number", minimum: -2, maximum: 2 }],
  ["frequency_penalty", "Frequency penalty", { type: "number", minimum: -2, maximum: 2 }],
  ["repetition_penalty", "Repetition penalty", { type: "number", exclusiveMinimum: 0 }],
  ["reasoning_effort", "Thinking", { enum: ["none", "minimal", "low", "medium", "high", "xhigh"] }],
  ["stop", "Stop at", { type: "array", items: { type: "string" } }],
];

const FORM = [
  ["schema", "JSON of this schema", { type: "object" }],
  ["logprobs", "Probabilities of tokens", { enum: ["shown"] }],
];
const MOST_LIKELY = 4;

/** The settings of the next answers. */
export class Settings {
  #fields = {};
  #form = {};
  #plugins = {};
  #whole = null;
  #tools;

  /** Make the form's fields. */
  constructor() {
    for (const [name, label, schema] of SAMPLING) {
      this.#fields[name] = makeField(name, schema, { label });
      byId("sampling").append(this.#fields[name].node);
    }
    for (const [name, label, schema] of FORM) {
      this.#form[name] = makeField(name, schema, { label });
      byId("answer-form").append(this.#form[name].node);
    }
    this.#tools = makeField("tools", { type: "array" }, { label: "Tools that the model may call" });
    byId("tools").append(this.#tools.node);
    byId("settings-button").addEventListener("click", () => this.show(byId("settings").hidden));
    byId("close-settings").addEventListener("click", () => this.show(false));
    byId("settings").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.show(false);
    });
    byId("forget-key").addEventListener("click", () => {
      forgetKey();
      this.showKey();
      byId("settings-heading").focus();
    });
  }

  /** Show or hide the form; the focus goes along. */
  show(isShown) {
    byId("settings").hidden = !isShown;
    byId("settings-button").setAttribute("aria-expanded", String(isShown));
    byId(isShown ? "settings-heading" : "settings-button").focus();
  }

  /** Show the values that the model has where nothing is written. */
  showDefaults(values) {
    for (const [name, { input }] of Object.entries(this.#fields)) {
      const value = values[name];
      if (typeof value === "number" && input.tagName === "INPUT") input.placeholder = String(value);
    }
  }

  /** Show the way to the live view, if a browser can open it. */
  async loadLink() {
    let address = null;
    try {
      address = (await requestJson("version")).live_view ?? null;
    } catch (error) {
      if (error.status === 401) throw error;
    }
    byId("live-settings").hidden = address === null;
    if (address !== null) byId("live-link").href = address.replace("*", location.hostname);
  }

  /** Show whether this tab holds a key. */
  showKey() {
    byId("key-settings").hidden = !hasKey();
  }

  /** Make the fields of the plugins' arguments, as the server describes them. */
  async loadPlugins() {
    let schemas = null;
    let root = null;
    try {
      root = await requestJson("openapi.json");
      schemas = root.components?.schemas?.PluginArgs?.properties ?? null;
    } catch (error) {
      if (error.status === 401) throw error;
      // A server without a description: the arguments are written as JSON.
    }
    const place = byId("plugins");
    place.replaceChildren();
    this.#plugins = {};
    this.#whole = null;
    if (schemas === null) {
      this.#whole = makeField("plugin_args", { type: "object" }, { label: "Arguments by plugin" });
      place.append(this.#whole.node);
      return;
    }
    for (const [name, schema] of Object.entries(schemas)) this.#addPlugin(place, name, schema, root);
    if (Object.keys(schemas).length === 0) {
      place.append(element("p", { class: "hint" }, "No plugin on this server takes arguments."));
    }
  }

  #addPlugin(place, name, schema, root) {
    const form = makeObjectForm(name, schema, root);
    this.#plugins[name] = form;
    const folded = element("details", { class: "plugin" }, element("summary", {}, name));
    if (typeof schema?.description === "string") {
      folded.append(element("p", { class: "hint" }, schema.description));
    }
    folded.append(form.node);
    place.append(folded);
  }

  /** Return the system prompt. */
  systemPrompt() {
    return byId("system-prompt").value.trim();
  }

  /** Return the fields of a request; a value that is wrong raises a FieldError. */
  read() {
    const fields = {};
    for (const [name, field] of Object.entries(this.#fields)) set(fields, name, field.read());
    const schema = this.#form.schema.read();
    if (schema !== undefined) {
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    if (this.#form.logprobs.read() !== undefined) {
      Object.assign(fields, { logprobs: true, top_logprobs: MOST_LIKELY });
    }
    const tools = this.#tools.read();
    if (tools !== undefined && !Array.isArray(tools)) {
      throw new FieldError("Tools: expected a list, in brackets.", this.#tools.input);
    }
    set(fields, "tools", tools?.length > 0 ? tools : undefined);
    const byPlugin = this.#whole === null ? {} : (this.#whole.read() ?? {});
    for (const [name, form] of Object.entries(this.#plugins)) set(byPlugin, name, form.read());
    set(fields, "plugin_args", Object.keys(byPlugin).length > 0 ? byPlugin : undefined);
    return fields;
  }

  /** Show a field that is wrong; return false if the form does not have it. */
  showWrong(input) {
    if (!input) return false;
    this.show(true);
    input.closest("details")?.setAttribute("open", "");
    input.setAttribute("aria-invalid", "true");
    input.focus();
    return true;
  }

  /** Return the input of a field by the path that an error of the server names. */
  inputOf(path) {
    const [first, plugin, part] = String(path ?? "").split(".");
    if (first === "response_format") return this.#form.schema.input;
    if (first.endsWith("logprobs")) return this.#form.logprobs.input;
    if (first === "tools" || first.startsWith("tools[")) return this.#tools.input;
    if (first !== "plugin_args") return this.#fields[first]?.input;
    const fields = this.#plugins[plugin]?.fields ?? {};
    return (fields[part] ?? Object.values(fields)[0] ?? this.#whole)?.input;
  }
}

function set(fields, name, value) {
  if (value !== undefined) fields[name] = value;
}
