// LangChain: chat, streams, tools and the way back, structured output, log-probabilities, errors.
import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { ChatOpenAI, OpenAI } from "@langchain/openai";

const [url, model] = process.argv.slice(2);
const isScripted = model === "scripted";
const options = {
  model, apiKey: "none", temperature: 0, maxTokens: 300, maxRetries: 0, configuration: { baseURL: `${url}/v1` },
};
const chat = new ChatOpenAI({ ...options, logprobs: true, topLogprobs: 2 });

const whole = await chat.invoke("fox");
assert.ok(whole.content.length > 0);
assert.ok(whole.response_metadata.logprobs.content.length > 0);
assert.ok(whole.usage_metadata.output_tokens > 0);
let streamed = null;
for await (const chunk of await chat.stream("fox")) streamed = streamed === null ? chunk : streamed.concat(chunk);
assert.equal(streamed.content, whole.content);
assert.equal(streamed.usage_metadata.output_tokens, whole.usage_metadata.output_tokens);

const schema = {
  title: "Verdict", type: "object", properties: { right: { type: "boolean" } }, required: ["right"],
  additionalProperties: false,
};
const verdict = await new ChatOpenAI({ ...options, maxTokens: 400 })
  .withStructuredOutput(schema, { name: "verdict", method: "jsonSchema", strict: true })
  .invoke("is it?");
assert.equal(typeof verdict.right, "boolean");

const completed = await new OpenAI({ ...options, maxTokens: 4 }).invoke("say abc");
assert.ok(completed.length > 0);

if (isScripted) {
  const weather = JSON.parse(process.argv[4]);
  const bound = new ChatOpenAI(options).bindTools([weather]);
  const called = await bound.invoke("weather");
  assert.deepEqual(called.tool_calls[0].args, { city: "Paris" });
  let chunks = null;
  for await (const chunk of await bound.stream("weather")) chunks = chunks === null ? chunk : chunks.concat(chunk);
  assert.deepEqual(chunks.tool_calls[0].args, { city: "Paris" });
  const result = new ToolMessage({ content: "sunny", tool_call_id: called.tool_calls[0].id });
  await bound.invoke([new HumanMessage("weather"), called, result]);
  const thought = await new ChatOpenAI(options).invoke("think");
  assert.equal(thought.content, "yes");
  assert.equal(thought.additional_kwargs.reasoning_content, "so it is");
}

await assert.rejects(
  new ChatOpenAI({ ...options, model: "gpt-5" }).invoke("x"),
  (error) => error.status === 404 && /model: expected/.test(error.message),
);
await assert.rejects(new ChatOpenAI({ ...options, temperature: -1 }).invoke("x"), (error) => error.status === 400);
console.log("done");
