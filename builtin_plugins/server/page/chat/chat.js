// The chat page: a conversation that is kept in this tab alone.

import { Announcer } from "./announcer.js";
import { Answer, receive } from "./answer.js";
import { ApiError, requestJson } from "../shared/api.js";
import { button, byId, element } from "../shared/dom.js";
import { download, keep, kept } from "./kept.js";
import { contentOf, ImagePicker, partsOf } from "./images.js";
import { AnswerView, ENDS, resultMessage, userMessage } from "./messages.js";
import { FieldError } from "./schema_form.js";
import { Settings } from "./settings.js";

const settings = new Settings();
const announcer = new Announcer(byId("announcements"));
const list = byId("messages");
const images = new ImagePicker(sentImages, (text) => announcer.say(text));

const EXAMPLES = [
  "Give me three tips for a good night's sleep.",
  "Write a Python function that reverses a string.",
  "Explain in two sentences why the sky is blue.",
];

/** What was said: each entry is an element and the messages that it stands for. */
let entries = [];
let stopping = null;
let openResults = null;

/** Add an entry; the one before it asks for results of tools no more. */
function addEntry(node, messages) {
  settleResults();
  entries.push({ node, messages });
  list.append(node);
  markLast();
  scrollDown(true);
}

function markLast() {
  const users = list.querySelectorAll(".message.user");
  users.forEach((node, index) => node.classList.toggle("is-last", index === users.length - 1));
  list.querySelectorAll(".retry").forEach((node) => {
    node.hidden = !list.lastElementChild.contains(node);
  });
  byId("empty").hidden = entries.length > 0;
  byId("new-chat").disabled = byId("export-chat").disabled = entries.length === 0;
  keep(settings.systemPrompt(), entries.map(({ messages }) => messages));
}

function removeFrom(index) {
  for (const { node } of entries.splice(index)) node.remove();
  settleResults();
  markLast();
}

function settleResults() {
  openResults?.settleResults();
  openResults = null;
}

function lastUserIndex() {
  return entries.findLastIndex(({ node }) => node.classList.contains("user"));
}

function say(content) {
  addUser(content);
  answerNow();
}

function addUser(content) {
  const { text, urls } = partsOf(content);
  const node = userMessage(text, urls, (edited) => {
    stop();
    removeFrom(lastUserIndex());
    byId("message").focus();
    say(contentOf(edited, urls));
  });
  addEntry(node, [{ role: "user", content }]);
}

/** Return the URLs of all images of the conversation. */
function sentImages() {
  const messages = entries.flatMap((entry) => entry.messages);
  return messages.filter(({ role }) => role === "user").flatMap(({ content }) => partsOf(content).urls);
}

/** Show the conversation that this tab had before it was reloaded. */
function restore() {
  const { system, entries: said } = kept();
  byId("system-prompt").value = system;
  let calls = [];
  for (const messages of said) {
    const [{ role, content }] = messages;
    if (role === "user") {
      addUser(content);
    } else if (role === "tool") {
      const names = messages.map((message, i) => ({ name: calls[i] ?? "a tool", content: message.content }));
      addEntry(resultMessage(names), messages);
    } else {
      const answer = Answer.of(messages[0]);
      const view = new AnswerView();
      addEntry(view.node, messages);
      finishView(view, answer, null);
      calls = answer.calls.map((call) => call.function.name);
      askResults(answer, view);
    }
  }
  markLast();
}

/** Return the conversation as `hardpoint chat --load` reads it. */
function exported() {
  const { model, messages, stream, stream_options: options, ...sampling } = requestBody();
  return JSON.stringify({ model, sampling, messages }, null, 2);
}

function exportChat() {
  try {
    download("conversation.json", exported());
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    showWrong(error);
  }
}

/** Show the field that is wrong. */
function showWrong(error) {
  announcer.say(error.message);
  settings.showWrong(error.input);
}

function retry() {
  if (stopping !== null) return;
  // The last answer goes; what came before it stays, results of tools too.
  if (entries.at(-1)?.node.classList.contains("answer")) removeFrom(entries.length - 1);
  byId("message").focus();
  answerNow();
}

function requestBody() {
  const system = settings.systemPrompt();
  return {
    model: byId("model").value || undefined,
    messages: [
      ...(system === "" ? [] : [{ role: "system", content: system }]),
      ...entries.flatMap(({ messages }) => messages),
    ],
    stream: true,
    stream_options: { include_usage: true },
    ...settings.read(),
  };
}

async function answerNow() {
  const answer = new Answer();
  const view = new AnswerView();
  const messages = [];
  const aborting = new AbortController();
  let body;
  try {
    body = requestBody();
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    finishView(view, answer, error.message);
    addEntry(view.node, messages);
    showWrong(error);
    return;
  }
  addEntry(view.node, messages);
  setAnswering(aborting);
  announcer.begin();
  const error = await outcome(answer, view, body, aborting.signal);
  if (stopping === aborting) setAnswering(null);
  if (!view.node.isConnected) return; // It was removed by a new conversation or an edit.
  if (!answer.isEmpty) messages.push(answer.message());
  finishView(view, answer, error);
  announcer.finish(answer.content);
  if (error !== null) announcer.say(error);
  else if (answer.finishReason === "stopped") announcer.say(ENDS.stopped);
  askResults(answer, view);
  markLast();
  scrollDown(false);
}

/** Return what is wrong with the answer, in words; null if nothing is. */
async function outcome(answer, view, body, signal) {
  try {
    await receive(answer, body, signal, () => {
      view.update(answer);
      announcer.update(answer.content);
    });
    return null;
  } catch (error) {
    if (error.name === "AbortError") {
      answer.finishReason = "stopped";
      return null;
    }
    if (!(error instanceof ApiError)) throw error;
    settings.showWrong(settings.inputOf(error.param));
    return error.message;
  } finally {
    settings.showKey();
  }
}

function finishView(view, answer, error) {
  const again = button("Retry", retry, { class: "quiet retry", "aria-label": "Retry this answer" });
  view.finish(answer, { note: answer.note(), error, actions: [again] });
}

function askResults(answer, view) {
  const calls = answer.message().tool_calls ?? [];
  if (entries.at(-1).node !== view.node) return; // It was stopped, and the next message sent.
  if (calls.length === 0 || calls.length !== answer.calls.length) return;
  openResults = view;
  view.askResults(calls, (texts) => {
    const results = calls.map((call, i) => ({ name: call.function.name, content: texts[i] }));
    const messages = calls.map((call, i) => {
      return { role: "tool", tool_call_id: call.id ?? `call-${i}`, content: texts[i] };
    });
    addEntry(resultMessage(results), messages);
    byId("message").focus();
    answerNow();
  });
}

function setAnswering(aborting) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  stopping = aborting;
  byId("send").hidden = aborting !== null;
  byId("stop").hidden = aborting === null;
  if (hadFocus) byId(aborting === null ? "message" : "stop").focus();
}

function stop() {
  stopping?.abort();
  setAnswering(null);
}

/** Follow the answer while its end is in view. */
let isFollowing = true;
const scroller = byId("conversation");

function scrollDown(always) {
  if (always) isFollowing = true;
  if (isFollowing) scroller.scrollTop = scroller.scrollHeight;
}

scroller.addEventListener("scroll", () => {
  isFollowing = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
});
list.addEventListener("grown", () => scrollDown(false));

function fitComposer() {
  const field = byId("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if ((text === "" && images.isEmpty) || stopping !== null) return;
  byId("message").value = "";
  fitComposer();
  say(contentOf(text, images.take()));
});
byId("message").addEventListener("input", fitComposer);
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  if (touch.matches) return; // Its keyboard has no other way to begin a line.
  event.preventDefault();
  byId("composer").requestSubmit();
});
const touch = matchMedia("(hover: none) and (pointer: coarse)");
function fitHint() {
  byId("message-hint").hidden = touch.matches;
}
touch.addEventListener("change", fitHint);
fitHint();
for (const text of EXAMPLES) {
  byId("examples").append(element("li", {}, button(text, () => {
    byId("message").focus();
    if (stopping === null) say(text);
  })));
}
byId("export-chat").addEventListener("click", exportChat);
byId("system-prompt").addEventListener("change", markLast);
byId("stop").addEventListener("click", stop);
byId("new-chat").addEventListener("click", () => {
  stop();
  removeFrom(0);
  announcer.begin();
  byId("message").focus();
});

async function start() {
  byId("start-problem").replaceChildren();
  try {
    const models = (await requestJson("v1/models")).data;
    byId("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    byId("model").disabled = models.length < 2;
    byId("model").title = models[0].id;
    document.title = `${models[0].id} – Hardpoint`;
    images.use(models[0].images ?? null);
    settings.showDefaults(models[0].default_sampling ?? {});
    await settings.loadPlugins();
    await settings.loadLink();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    byId("start-problem").replaceChildren(
      element("p", { class: "problem" }, error.message),
      button(error.status === 401 ? "Enter a key" : "Try again", start, { class: "primary" }),
    );
  }
  settings.showKey();
}

restore();
start();
