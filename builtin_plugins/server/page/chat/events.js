// Server-sent events from a fetched stream, however its bytes are split.

/** Finds the data of events in pieces of text. */
export class EventParser {
  #rest = "";
  #data = [];

  /** Return the data of the events that a piece of text ends. */
  feed(text) {
    const found = [];
    const buffer = this.#rest + text;
    let start = 0;
    for (;;) {
      const end = lineEnd(buffer, start);
      if (end === null) break;
      this.#line(buffer.slice(start, end.at), found);
      start = end.next;
    }
    this.#rest = buffer.slice(start);
    return found;
  }

  #line(line, found) {
    if (line === "") {
      if (this.#data.length > 0) found.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

/** Return where a line ends and the next one begins; null if its end has not come yet. */
function lineEnd(buffer, start) {
  for (let at = start; at < buffer.length; at += 1) {
    if (buffer[at] === "\n") return { at, next: at + 1 };
    if (buffer[at] === "\r") {
      if (at + 1 === buffer.length) return null; // Its second half may come.
      return { at, next: buffer[at + 1] === "\n" ? at + 2 : at + 1 };
    }
  }
  return null;
}

/** Yield the data of a stream's events as they come. */
export async function* readEvents(stream) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
