// The conversation of this tab, which a reload does not end: the tab's session storage has it.

const STORED = "hardpoint.conversation";

/** Keep a conversation: its system prompt, and the messages of each entry. */
export function keep(system, entries) {
  const said = entries.filter((messages) => messages.length > 0);
  try {
    if (said.length === 0) sessionStorage.removeItem(STORED);
    else sessionStorage.setItem(STORED, JSON.stringify({ system, entries: said }));
  } catch {
    // It is too long to be kept: a reload ends it.
    sessionStorage.removeItem(STORED);
  }
}

/** Return the conversation that was kept, or an empty one. */
export function kept() {
  try {
    const { system, entries } = JSON.parse(sessionStorage.getItem(STORED));
    return { system: String(system), entries };
  } catch {
    return { system: "", entries: [] };
  }
}

/** Save a text as a file of the user's. */
export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
