// The AI SDK: text, streams, reasoning that is sent back, tools over two steps, objects, errors.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const isScripted = name === "scripted";
const provider = createOpenAICompatible({
  name: "hardpoint", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(name);
const fixed = { model, temperature: 0, maxOutputTokens: 300, maxRetries: 0 };

const whole = await generateText({ ...fixed, prompt: "fox" });
assert.ok(whole.text.length > 0);
const stream = streamText({ ...fixed, prompt: "fox" });
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

const verdict = await generateText({
  ...fixed, maxOutputTokens: 400, prompt: "is it?",
  output: Output.object({
    schema: jsonSchema({
      type: "object", properties: { right: { type: "boolean" } }, required: ["right"],
      additionalProperties: false,
    }),
  }),
});
assert.equal(typeof verdict.output.right, "boolean");

if (isScripted) {
  const weather = JSON.parse(process.argv[4]).function;
  const tools = {
    get_weather: tool({
      description: weather.description,
      inputSchema: jsonSchema(weather.parameters),
      execute: async ({ city }) => `sunny in ${city}`,
    }),
  };
  const called = await generateText({ ...fixed, prompt: "weather", tools, stopWhen: stepCountIs(1) });
  assert.deepEqual(called.toolResults[0].output, `sunny in ${called.toolCalls[0].input.city}`);
  const calls = streamText({ ...fixed, prompt: "weather", tools, stopWhen: stepCountIs(2) });
  await calls.consumeStream();
  assert.equal((await calls.steps).length >= 1, true);

  const thought = streamText({ ...fixed, prompt: "think" });
  assert.equal(await thought.reasoningText, "so it is", "the thought is shown once");
  assert.equal(await thought.text, "yes");
  const back = [{ role: "user", content: "think" }, ...(await thought.response).messages];
  await generateText({ ...fixed, maxOutputTokens: 2, messages: [...back, { role: "user", content: "more" }] });
}

await assert.rejects(
  generateText({ ...fixed, model: provider("gpt-5"), prompt: "x" }),
  (error) => APICallError.isInstance(error) && error.statusCode === 404 && /model: expected/.test(error.message),
);
await assert.rejects(
  generateText({ ...fixed, temperature: -1, prompt: "x" }),
  (error) => APICallError.isInstance(error) && error.statusCode === 400 && !error.isRetryable,
);

const leaving = new AbortController();
const endless = streamText({ ...fixed, maxOutputTokens: 400, prompt: "x", abortSignal: leaving.signal });
for await (const _ of endless.textStream) leaving.abort();
console.log("done");
