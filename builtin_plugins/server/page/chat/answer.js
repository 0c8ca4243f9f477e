// One answer of /v1/chat/completions as it comes.

import { ApiError, request } from "../shared/api.js";
import { readEvents } from "./events.js";

const SHORTEST_SECONDS = 0.05; // In less, the speed of an answer says nothing.

/** The parts of an answer, as far as they came. */
export class Answer {
  reasoning = "";
  content = "";
  calls = [];
  finishReason = null;
  warning = "";
  invalid = "";
  usage = null;
  positions = [];
  thinkingSeconds = null;
  #begun = performance.now();
  #first = null;
  #last = null;

  /** Return the answer that a message is of. */
  static of({ content, reasoning = "", tool_calls: calls = [] }) {
    return Object.assign(new Answer(), { content, reasoning, calls });
  }

  /** Add what a chunk holds; an error in it is raised. */
  add(chunk) {
    if (chunk.error) {
      throw new ApiError(chunk.error.message ?? "The answer failed.", { param: chunk.error.param });
    }
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      if (choice.index === 0) this.#addChoice(choice);
    }
  }

  #addChoice({ delta = {}, finish_reason: reason, warning, validation_error: invalid, logprobs }) {
    this.positions.push(...(logprobs?.content ?? []));
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    const text = delta.content ?? "";
    this.reasoning += thought;
    this.content += text;
    for (const part of delta.tool_calls ?? []) this.#addCall(part);
    if (thought || text || delta.tool_calls) this.#count(thought !== "");
    this.finishReason = reason ?? this.finishReason;
    this.warning = warning ?? this.warning;
    this.invalid = invalid ?? this.invalid;
  }

  #count(isThought) {
    const now = performance.now();
    this.#first ??= now;
    this.#last = now;
    if (isThought) this.thinkingSeconds = (now - this.#first) / 1000;
  }

  #addCall({ index = 0, id, function: called = {} }) {
    const call = (this.calls[index] ??= {
      id: null,
      type: "function",
      function: { name: "", arguments: "" },
    });
    call.id ??= id ?? null;
    call.function.name += called.name ?? "";
    call.function.arguments += called.arguments ?? "";
  }

  /** Return whether anything came. */
  get isEmpty() {
    return this.reasoning === "" && this.content === "" && this.calls.length === 0;
  }

  /** Return the message for the next request; calls that were cut off are left out. */
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning !== "") message.reasoning = this.reasoning;
    const calls = this.calls.filter((call) => isJson(call.function.arguments));
    if (calls.length > 0) message.tool_calls = calls;
    return message;
  }

  /** Return tokens, speed and delay in words. */
  note() {
    const words = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens !== undefined) words.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    const seconds = (this.#last - this.#first) / 1000;
    if (tokens > 1 && seconds >= SHORTEST_SECONDS) words.push(`${rounded((tokens - 1) / seconds)} tokens/s`);
    if (this.#first !== null) words.push(`first after ${rounded((this.#first - this.#begun) / 1000)} s`);
    if (this.usage) words.push(`prompt of ${this.usage.prompt_tokens} tokens`);
    return words.join(" · ");
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function rounded(number) {
  return number >= 100 ? String(Math.round(number)) : number.toFixed(number >= 10 ? 1 : 2);
}

/** Ask for an answer and fill it; `onChange` is called after each chunk. */
export async function receive(answer, body, signal, onChange) {
  const response = await request("v1/chat/completions", { body, signal });
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      answer.add(JSON.parse(data));
      onChange();
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
  throw new ApiError("The connection ended before the answer was complete.");
}
