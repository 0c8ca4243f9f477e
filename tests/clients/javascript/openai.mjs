// OpenAI's client: chat, completions, responses, tools, formats, log-probabilities, errors, an end by the client.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const isScripted = model === "scripted";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const schema = {
  type: "object",
  properties: { right: { type: "boolean" } },
  required: ["right"],
  additionalProperties: false,
};

const whole = await client.chat.completions.create({
  model, messages: user("fox"), temperature: 0, max_tokens: 40, logprobs: true, top_logprobs: 2,
});
const text = whole.choices[0].message.content;
assert.ok(text.length > 0);
assert.ok(whole.choices[0].logprobs.content[0].top_logprobs.length >= 2);
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages: user("fox"), temperature: 0, max_tokens: 40, stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const completions = await client.completions.create({ model, prompt: ["a", "b"], n: 2, max_tokens: 2 });
assert.deepEqual(completions.choices.map((choice) => choice.index), [0, 1, 2, 3]);

const formatted = await client.chat.completions.create({
  model, messages: user("is it?"), temperature: 0, max_tokens: 400,
  response_format: { type: "json_schema", json_schema: { name: "verdict", strict: true, schema } },
});
assert.equal(typeof JSON.parse(formatted.choices[0].message.content).right, "boolean");

const response = await client.responses.create({
  model, input: "fox", temperature: 0, max_output_tokens: 40,
});
assert.equal(response.output_text, text);
const events = [];
for await (const event of await client.responses.create({
  model, input: "fox", temperature: 0, max_output_tokens: 40, stream: true,
})) {
  events.push(event.type);
}
assert.equal(events[0], "response.created");
assert.ok(["response.completed", "response.incomplete"].includes(events.at(-1)), events.at(-1));

if (isScripted) {
  const weather = JSON.parse(process.argv[4]);
  const runner = client.chat.completions.stream({
    model, messages: user("weather"), tools: [weather], temperature: 0,
  });
  const message = await runner.finalMessage();
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Paris" });
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
  await client.chat.completions.create({
    model, messages: [...user("weather"), message, result], tools: [weather], max_tokens: 2,
  });
  const thought = await client.chat.completions.create({ model, messages: user("think"), temperature: 0 });
  assert.equal(thought.choices[0].message.reasoning_content, "so it is");
}

await assert.rejects(
  client.chat.completions.create({ model, messages: user("x"), temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(
  client.chat.completions.create({ model: "gpt-5", messages: user("x") }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
const vectors = await client.embeddings.create({ model, input: "x" });
assert.ok(vectors.data[0].embedding.every(Number.isFinite) && vectors.data[0].embedding.length > 0);

const endless = await client.chat.completions.create({
  model, messages: user("x"), max_tokens: 400, ignore_eos: true, stream: true,
});
for await (const _ of endless) break;  // which ends the request
console.log("done");
