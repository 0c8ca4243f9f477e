// Images of the message that is being written: picked, pasted or dropped, shown until it is sent.

import { button, byId, element } from "../shared/dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const OTHER_BYTES = 64 * 1024; // Of a request, besides its images.

/** The images that go with the next message. */
export class ImagePicker {
  #limits = null;
  #images = [];
  #sent;
  #announce;

  /** Use the fields of the page; `sent` returns the URLs of images that were sent before. */
  constructor(sent, announce) {
    this.#sent = sent;
    this.#announce = announce;
    byId("image-files").setAttribute("accept", TYPES.join(","));
    byId("add-images").addEventListener("click", () => byId("image-files").click());
    byId("image-files").addEventListener("change", (event) => {
      this.add([...event.target.files]);
      event.target.value = ""; // So that the same file can be picked again.
    });
    byId("message").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (this.#limits === null || files.length === 0) return;
      event.preventDefault();
      this.add(files);
    });
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // Otherwise the browser leaves the page for the file.
      event.dataTransfer.dropEffect = this.#limits === null ? "none" : "copy";
      byId("composer").classList.toggle("is-dropping", this.#limits !== null);
    });
    for (const name of ["dragleave", "drop"]) {
      document.addEventListener(name, () => byId("composer").classList.remove("is-dropping"));
    }
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      if (this.#limits !== null) this.add([...event.dataTransfer.files]);
    });
  }

  /** Take images within limits; with null, the model takes none. */
  use(limits) {
    this.#limits = limits;
    byId("add-images").hidden = limits === null;
    byId("composer").classList.toggle("takes-images", limits !== null);
  }

  /** Return whether there are any. */
  get isEmpty() {
    return this.#images.length === 0;
  }

  /** Return the URLs, and begin with none. */
  take() {
    const urls = this.#images.map(({ url }) => url);
    this.#images = [];
    this.#show();
    this.#complain([]);
    return urls;
  }

  /** Add files; what cannot be added is said. */
  async add(files) {
    const problems = [];
    for (const file of files) {
      const problem = await this.#addOne(file);
      if (problem !== null) problems.push(problem);
    }
    this.#complain(problems);
    byId("message").focus();
  }

  /** Add a file; return what is wrong with it, or null. */
  async #addOne(file) {
    const name = file.name || "The image";
    if (!TYPES.includes(file.type)) return `${name}: expected a PNG, JPEG, WEBP or GIF image.`;
    const { max_bytes: bytes, max_pixels: pixels } = this.#limits;
    if (file.size > bytes) return `${name}: it has ${size(file.size)}, and at most ${size(bytes)} are taken.`;
    const url = await dataUrl(file);
    const shape = await dimensions(url);
    if (shape === null) return `${name}: this is no image that can be read.`;
    if (shape.width * shape.height > pixels) {
      return `${name}: it has ${shape.width} × ${shape.height} pixels, and at most ${pixels} are taken.`;
    }
    const urls = [...this.#sent(), ...this.#images.map((image) => image.url), url];
    if (urls.length > this.#limits.max_items) {
      return `${name}: a conversation may have ${this.#limits.max_items} images.`;
    }
    const { max_total_bytes: total, max_body_bytes: body } = this.#limits;
    const room = Math.min(total, ((body - OTHER_BYTES) / 4) * 3);
    if ((urls.reduce((sum, one) => sum + one.length, 0) / 4) * 3 > room) {
      return `${name}: the images of a conversation may have ${size(room)} together.`;
    }
    this.#images.push({ url, name });
    this.#show();
    this.#announce(`Added ${name}`);
    return null;
  }

  #remove(index) {
    const [{ name }] = this.#images.splice(index, 1);
    this.#show();
    this.#complain([]);
    this.#announce(`Removed ${name}`);
    const left = byId("attached").querySelectorAll("button");
    (left[Math.min(index, left.length - 1)] ?? byId("message")).focus();
  }

  #show() {
    byId("attached").hidden = this.isEmpty;
    byId("attached").replaceChildren(
      ...this.#images.map(({ url, name }, index) =>
        element(
          "li",
          {},
          element("img", { src: url, alt: name }),
          button("×", () => this.#remove(index), { "aria-label": `Remove ${name}`, title: "Remove" }),
        ),
      ),
    );
  }

  #complain(problems) {
    byId("image-problem").hidden = problems.length === 0;
    byId("image-problem").textContent = problems.join(" ");
  }
}

/** Return the content of a message: a text, or parts if it has images. */
export function contentOf(text, urls) {
  if (urls.length === 0) return text;
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text === "" ? images : [...images, { type: "text", text }];
}

/** Return the text and the images of a message's content. */
export function partsOf(content) {
  if (typeof content === "string") return { text: content, urls: [] };
  return {
    text: content.filter(({ type }) => type === "text").map(({ text }) => text).join("\n"),
    urls: content.filter(({ type }) => type === "image_url").map((part) => part.image_url.url),
  };
}

/** Return the images of a message as the page shows them; null without any. */
export function imageList(urls) {
  if (urls.length === 0) return null;
  const items = urls.map((src, index) => {
    return element("li", {}, element("img", { src, alt: `Image ${index + 1} of ${urls.length}` }));
  });
  return element("ul", { class: "images", "aria-label": "Images" }, ...items);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

async function dimensions(url) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    return null;
  }
  return { width: image.naturalWidth, height: image.naturalHeight };
}

function size(bytes) {
  return bytes < 1 << 20 ? `${Math.ceil(bytes / 1024)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`;
}
