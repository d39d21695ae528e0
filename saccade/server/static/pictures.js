// The pictures and videos that will be sent, in order. Reads files; knows neither the server nor how they are shown.

import { megabytes } from "./about.js";
import { framesOf } from "./frames.js";

// Systems that know no type for a file leave it empty.
const PICTURE_NAME = /\.(jpe?g|png|webp|gif|bmp|tiff?)$/i;
const VIDEO_NAME = /\.(mp4|m4v|mov|webm|mkv|avi)$/i;

export class Pictures extends EventTarget {
  #nextId = 0;
  #adding = Promise.resolve(); // ends with the files that are being read
  list = []; // {id, kind, name, url, bitmap, clip, problem, questions}; clip: a video's address for this browser
  selected = null; // the id of the one that is shown large

  get shown() {
    return this.list.find((picture) => picture.id === this.selected) ?? this.list.at(-1) ?? null;
  }

  // Adds what can be added; returns one sentence for each file that cannot. `taken` is what the server takes.
  // One call after the other: two at once would count the same free places.
  add(files, taken) {
    this.#adding = this.#adding.then(() => this.#addAll(files, taken));
    return this.#adding;
  }

  // When all that has been given so far is in the list.
  get settled() {
    return this.#adding;
  }

  async #addAll(files, taken) {
    const problems = [];
    for (const file of files) {
      try {
        for (const part of await partsOf(file, taken)) await this.#addOne(part, taken);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.#changed();
    return problems;
  }

  remove(id) {
    const { clip } = this.list.find((picture) => picture.id === id) ?? {};
    if (clip) URL.revokeObjectURL(clip);
    this.list = this.list.filter((picture) => picture.id !== id);
    this.#changed();
  }

  clear() {
    for (const { id } of this.list) this.remove(id);
  }

  // Whether there are pictures and none is the user's own.
  get isSample() {
    return this.list.length > 0 && this.list.every(({ questions }) => questions);
  }

  select(id) {
    this.selected = id;
    this.dispatchEvent(new Event("select"));
  }

  // Those that are sent: a picture the server refused stays to be seen, and the others go without it.
  get good() {
    return this.list.filter((picture) => !picture.problem);
  }

  get problems() {
    return this.list.filter((picture) => picture.problem).map(({ name, problem }) => `${name}: ${problem}`);
  }

  // False when it has been removed meanwhile.
  refuse(id, sentence) {
    const picture = this.list.find((picture) => picture.id === id);
    if (picture) picture.problem = sentence;
    return Boolean(picture);
  }

  // Other limits may judge otherwise.
  forgive() {
    for (const picture of this.list) picture.problem = null;
  }

  async #addOne(file, { most, maxBytes }) {
    const kind = isVideo(file) ? "video" : "image";
    const name = file.name || "pasted picture";
    if (this.list.filter((picture) => picture.kind === kind).length >= most[kind]) {
      const nouns = `${kind === "video" ? "video" : "picture"}${most[kind] === 1 ? "" : "s"}`;
      throw new Error(`At most ${most[kind]} ${nouns} fit into one prompt here; ${name} was left out.`);
    }
    if (file.size > maxBytes[kind]) {
      throw new Error(`${name} has ${megabytes(file.size)}; this server takes up to ${megabytes(maxBytes[kind])}.`);
    }
    const content = await contentOf(file, kind); // meanwhile the list may change
    this.list = [...this.list, { id: this.#nextId++, kind, name, problem: null, ...content }];
    this.selected = this.list.at(-1).id;
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function isVideo(file) {
  return file.type.startsWith("video/") || VIDEO_NAME.test(file.name);
}

async function contentOf(file, kind) {
  const url = await dataUrl(file);
  const questions = file.questions ?? null;
  if (kind === "video") return { url, bitmap: null, clip: URL.createObjectURL(file), questions };
  const bitmap = await createImageBitmap(file).catch(() => null); // the server may read what this browser cannot show
  return { url, bitmap, clip: null, questions };
}

async function partsOf(file, { frames, most, formats }) {
  if (file.type.startsWith("image/") || PICTURE_NAME.test(file.name)) return [file];
  if (!isVideo(file)) {
    throw new Error(`${file.name} is neither a picture nor a video. Pictures may be ${formats.join(", ")}.`);
  }
  if (most.video > 0) return [file];
  try {
    const parts = await framesOf(file, frames);
    return parts.map((part) => Object.assign(part, { questions: file.questions }));
  } catch (error) {
    throw new Error(`No frames could be taken from ${file.name}: ${error.message} in this browser. Try MP4 or WebM.`);
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} could not be read from your disk.`)));
    reader.readAsDataURL(file);
  });
}
