// The live view: asks the admin address once a second while somebody looks.

import { ApiError, requestJson } from "../shared/api.js";
import { button, byId, element } from "../shared/dom.js";
import { Figure } from "./sparkline.js";

const SECONDS = 1;
const MOST_ROWS = 200;

const share = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
const count = (value) => Math.round(value).toLocaleString("en");
const figures = {
  running: new Figure("Running", { words: count }),
  waiting: new Figure("Waiting", { words: count }),
  tokens: new Figure("Output tokens/s", { words: count }),
  cache: new Figure("KV cache in use", { words: share, highest: 1 }),
  hits: new Figure("Prefix cache hits", { words: share, highest: 1 }),
};
byId("figures").append(...Object.values(figures).map(({ node }) => node));

let isPaused = false;
let timer = null;
let last = null;

/** Ask for everything once, show it, and ask again in a second. */
async function poll() {
  timer = null;
  try {
    const [{ requests }, stats, { plugins, meters }, health] = await Promise.all([
      requestJson("requests"),
      requestJson("engines/stats"),
      requestJson("plugins"),
      requestJson("health", { accept: [503] }),
    ]);
    show({ seconds: performance.now() / 1000, requests, stats, plugins, meters, health });
    byId("problem").replaceChildren();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showProblem(error);
    if (error.status === 401) return;
  }
  schedule();
}

function schedule() {
  if (timer === null && !isPaused && !document.hidden) timer = setTimeout(poll, SECONDS * 1000);
}

function showProblem(error) {
  setState("No figures", true);
  if (byId("problem").textContent.startsWith(error.message)) return;
  const problem = element("p", { class: "problem" }, error.message);
  byId("problem").replaceChildren(problem);
  if (error.status === 401) {
    const again = button("Enter a key", async () => {
      again.disabled = true;
      await poll();
      again.disabled = false;
    }, { class: "primary" });
    byId("problem").append(again);
  }
}

function show(now) {
  const { stats, requests } = now;
  figures.running.add(stats.num_running);
  figures.waiting.add(stats.num_waiting, `${count(stats.num_preemptions)} preempted so far`);
  figures.cache.add(stats.kv_cache_usage);
  const cache = stats.prefix_cache;
  const hits = cache.queried_tokens > 0 ? cache.hit_tokens / cache.queried_tokens : 0;
  figures.hits.add(hits, `${count(cache.hit_tokens)} of ${count(cache.queried_tokens)} tokens`);
  figures.tokens.add(tokenRate(now));
  showHealth(now.health);
  showRequests(requests);
  showPlugins(now);
  last = now;
}

/** Return output tokens a second since the last poll; those of requests that ended are not seen. */
function tokenRate({ requests, seconds }) {
  if (last === null) return null;
  const before = new Map(last.requests.map((r) => [r.request_id, r.num_output_tokens]));
  const made = requests.map((r) => r.num_output_tokens - (before.get(r.request_id) ?? 0));
  const sum = made.reduce((total, tokens) => total + Math.max(tokens, 0), 0);
  return sum / Math.max(seconds - last.seconds, 0.001);
}

function showHealth(health) {
  const quarantined = Object.keys(health.quarantined ?? {});
  let words = "Serving";
  if (health.status === "degraded") words = `Degraded: ${quarantined.join(", ")} in quarantine`;
  if (health.status === "unavailable") words = `Unavailable: ${health.reason ?? "no reason given"}`;
  if (health.restarts > 0) words += `, restarted ${times(health.restarts)}`;
  setState(words, health.status !== "ok");
}

function setState(words, isBad) {
  const text = isPaused ? "Updates are paused" : words;
  byId("state").classList.toggle("bad", isBad && !isPaused);
  if (byId("state").textContent !== text) byId("state").textContent = text;
}

function times(number) {
  return number === 1 ? "once" : `${number} times`;
}

function showRequests(requests) {
  byId("no-requests").hidden = requests.length > 0;
  byId("requests-scroll").hidden = requests.length === 0;
  const ordered = requests.toSorted((a, b) => b.age_seconds - a.age_seconds);
  fillRows(byId("requests"), ordered.slice(0, MOST_ROWS), requestKey, requestCells);
  const hidden = requests.length - MOST_ROWS;
  byId("more-requests").hidden = hidden <= 0;
  byId("more-requests").textContent = `${hidden} younger ones are not shown.`;
}

function requestKey(request) {
  return request.request_id;
}

function requestCells(request) {
  const { num_prompt_tokens: prompt, num_computed_tokens: computed } = request;
  const name = request.index > 0 ? `${request.external_id} #${request.index}` : request.external_id;
  const tags = Object.entries(request.tags ?? {}).map(([tag, value]) => `${tag}=${value}`);
  return [
    [name, tags.join(" ")],
    [request.status.replaceAll("_", " ")],
    [ageWords(request.age_seconds)],
    [computed < prompt ? `${count(computed)} of ${count(prompt)}` : count(prompt)],
    [count(request.num_output_tokens)],
    [String(request.priority)],
    [request.waits_for?.message ?? ""],
  ];
}

function ageWords(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

const REQUEST_CLASSES = ["", "", "number", "number", "number", "number", "reason"];
const PLUGIN_CLASSES = ["", "", "number", "number", "number", "number", "number", "reason"];

/** Make the rows of a table those of some items; rows that stay keep their elements. */
function fillRows(body, items, keyOf, cellsOf) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const classes = body.id === "requests" ? REQUEST_CLASSES : PLUGIN_CLASSES;
  const rows = items.map((item) => {
    const key = keyOf(item);
    const row = old.get(key) ?? element("tr", { "data-key": key }, ...classes.map(newCell));
    cellsOf(item).forEach(([text, beside = "", isBad = false], index) => {
      fillCell(row.children[index], text, beside, isBad);
    });
    return row;
  });
  const kept = new Set(rows);
  for (const row of old.values()) if (!kept.has(row)) row.remove();
  rows.forEach((row, index) => {
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
}

function newCell(className) {
  return element("td", { class: className || null }, element("span"), element("div", { class: "tags" }));
}

function fillCell(cell, text, beside, isBad) {
  const [first, second] = cell.children;
  if (first.textContent !== text) first.textContent = text;
  if (second.textContent !== beside) second.textContent = beside;
  second.hidden = beside === "";
  first.classList.toggle("bad", isBad);
}

function showPlugins(now) {
  const known = byName(now.plugins);
  const { faults = {}, quarantined = {}, fallbacks = {}, slow = {} } = now.health;
  const active = new Set([now.meters, faults, quarantined, fallbacks, slow].flatMap(Object.keys));
  const rows = [...active].map((name) => pluginRow(name, known.get(name), now));
  rows.sort((a, b) => Number(b.isBad) - Number(a.isBad) || b.seconds - a.seconds || (a.name < b.name ? -1 : 1));
  byId("no-plugins").hidden = rows.length > 0;
  byId("plugins-scroll").hidden = rows.length === 0;
  fillRows(byId("plugins"), rows, ({ name }) => name, pluginCells);
  const idle = now.plugins.filter((plugin) => !active.has(plugin.name) || known.get(plugin.name) !== plugin);
  byId("idle").hidden = idle.length === 0;
  byId("idle-count").textContent = `${idle.length} without figures`;
  const words = idle.map((plugin) => `${plugin.kind}: ${plugin.name}`);
  if (byId("idle-plugins").childElementCount !== words.length) {
    byId("idle-plugins").replaceChildren(...words.map((text) => element("li", {}, text)));
  }
}

/** Return plugins by name; of one name, the logits processor, which is what has a meter. */
function byName(plugins) {
  const isProcessor = ({ kind }) => kind === "logits_processors";
  const ordered = [...plugins.filter((p) => !isProcessor(p)), ...plugins.filter(isProcessor)];
  return new Map(ordered.map((plugin) => [plugin.name, plugin]));
}

function pluginRow(name, plugin, { meters, health, seconds }) {
  const meter = meters[name] ?? { seconds: 0, rows: 0, slow_steps: 0, faults: 0 };
  const spent = meter.seconds - (last?.meters[name]?.seconds ?? meter.seconds);
  const told = [health.quarantined?.[name], health.fallbacks?.[name], health.slow?.[name]];
  const why = told.find(Boolean) ?? "";
  return {
    name,
    version: plugin?.version ?? "",
    kind: plugin?.kind ?? "",
    now: last === null ? null : Math.max(spent, 0) / Math.max(seconds - last.seconds, 0.001),
    seconds: meter.seconds,
    rows: meter.rows,
    slow: meter.slow_steps,
    faults: health.faults?.[name] ?? meter.faults,
    isBad: name in (health.quarantined ?? {}),
    why: typeof why === "string" ? why : why.message,
  };
}

function pluginCells(row) {
  let state = row.why;
  if (row.isBad) state = `In quarantine: ${row.why}`;
  return [
    [row.name, row.version],
    [row.kind.replaceAll("_", " ")],
    [row.now === null ? "–" : share(row.now)],
    [`${row.seconds.toFixed(2)} s`],
    [count(row.rows)],
    [count(row.slow), "", row.slow > 0],
    [count(row.faults), "", row.faults > 0],
    [state, "", row.isBad],
  ];
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) {
    clearTimeout(timer);
    timer = null;
    setState("", false);
  } else {
    last = null; // Rates over the pause would be wrong.
    poll();
  }
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    timer = null;
  } else {
    last = null;
    schedule();
  }
});

poll();
