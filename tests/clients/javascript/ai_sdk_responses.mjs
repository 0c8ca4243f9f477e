// The AI SDK with OpenAI's provider, on the Responses API: steps refer to stored items, unless store is false.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, name, stores, weather] = process.argv.slice(2);
const { description, parameters } = JSON.parse(weather).function;
const bodies = [];
const recordingFetch = (address, options) => {
  bodies.push(options.body);
  return fetch(address, options);
};
const model = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none", fetch: recordingFetch })(name);
const tools = {
  get_weather: tool({
    description, inputSchema: jsonSchema(parameters), execute: async ({ city }) => `sunny in ${city}`,
  }),
};
const twoSteps = { model, tools, temperature: 0, maxRetries: 0, stopWhen: stepCountIs(2), prompt: "weather" };
const unstored = { ...twoSteps, providerOptions: { openai: { store: false } } };

const whole = await generateText(unstored);
assert.equal(whole.steps.length, 2);
if (stores === "yes") {
  const referring = await generateText(twoSteps);
  assert.ok(bodies.at(-1).includes("item_reference"));
  assert.equal(referring.text, whole.text);
  assert.equal(referring.totalUsage.inputTokens, whole.totalUsage.inputTokens);
  const stream = streamText(twoSteps);
  assert.equal(await stream.text, whole.text);
} else {
  await assert.rejects(generateText(twoSteps), /'item_reference': nothing is stored .* store = false/);
}
console.log("done");
