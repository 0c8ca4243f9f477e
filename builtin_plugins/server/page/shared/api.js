// Requests to the server that the page came from, with the key of this tab.

import { byId } from "./dom.js";

const STORED_KEY = "hardpoint.key";

/** An answer that is an error, or none at all, in words. */
export class ApiError extends Error {
  /** Make an error; `param` is the path of the field that is wrong. */
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Return the response of a route; ask for a key while the server wants another one. */
export async function request(path, { body, signal, accept = [] } = {}) {
  for (;;) {
    const key = storedKey();
    const response = await sent(path, body, signal, key);
    if (response.ok || accept.includes(response.status)) return response;
    if (response.status !== 401) throw await errorOf(response);
    if (storedKey() === key) await askKey(key !== null);
  }
}

/** Return the JSON that a route answers. */
export async function requestJson(path, options) {
  return (await request(path, options)).json();
}

/** Return whether this tab holds a key. */
export function hasKey() {
  return storedKey() !== null;
}

/** Forget the key of this tab, and what it kept of answers that needed the key. */
export function forgetKey() {
  sessionStorage.clear();
}

function storedKey() {
  return sessionStorage.getItem(STORED_KEY);
}

async function sent(path, body, signal, key) {
  const headers = {};
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. It may have ended, or be starting again.");
  }
}

async function errorOf(response) {
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // No JSON: a proxy may have answered. The status is all that is known.
  }
  const words = typeof detail.message === "string" ? detail.message : "";
  const wait = Number(response.headers.get("retry-after"));
  let message = words || `The server answered with status ${response.status}.`;
  if (wait > 0) message += ` Try again in ${wait} ${wait === 1 ? "second" : "seconds"}.`;
  return new ApiError(message, { status: response.status, param: detail.param ?? null });
}

let asking = null;

/** Ask for a key once, however many requests need it. */
function askKey(wasRefused) {
  asking ??= keyFromDialog(wasRefused).finally(() => {
    asking = null;
  });
  return asking;
}

function keyFromDialog(wasRefused) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-refused").hidden = !wasRefused;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    const closed = () => {
      const key = dialog.returnValue === "use" ? field.value.trim() : "";
      field.value = "";
      if (key === "") {
        reject(new ApiError("This server needs a key.", { status: 401 }));
        return;
      }
      sessionStorage.setItem(STORED_KEY, key);
      resolve();
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}
