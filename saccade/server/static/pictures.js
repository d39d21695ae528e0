// The pictures that will be sent, in order. Reads files; knows neither the server nor how a picture is shown.

import { framesOf } from "./video.js";

const PICTURE_NAME = /\.(jpe?g|png|webp|gif|bmp|tiff?)$/i; // systems that know no type for a file leave it empty

export class Pictures extends EventTarget {
  #nextId = 0;
  list = []; // {id, name, url, bitmap, problem}
  selected = null; // the id of the one that is shown large

  get shown() {
    return this.list.find((picture) => picture.id === this.selected) ?? this.list.at(-1) ?? null;
  }

  // Adds what can be added; returns one sentence for each file that cannot.
  async add(files, { frames, most, formats }) {
    const problems = [];
    for (const file of files) {
      try {
        for (const part of await partsOf(file, frames, formats)) await this.#addOne(part, most);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.#changed();
    return problems;
  }

  remove(id) {
    this.list = this.list.filter((picture) => picture.id !== id);
    this.#changed();
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

  async #addOne(file, most) {
    if (this.list.length >= most) {
      throw new Error(`At most ${most} pictures fit into one prompt here; ${file.name} was left out.`);
    }
    const bitmap = await createImageBitmap(file).catch(() => null); // the server may read what this browser cannot show
    const name = file.name || "pasted picture";
    const picture = { id: this.#nextId++, name, url: await dataUrl(file), bitmap, problem: null };
    this.list = [...this.list, picture];
    this.selected = picture.id;
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

async function partsOf(file, frames, formats) {
  if (file.type.startsWith("image/") || PICTURE_NAME.test(file.name)) return [file];
  if (!file.type.startsWith("video/")) {
    throw new Error(`${file.name} is neither a picture nor a video. Pictures may be ${formats.join(", ")}.`);
  }
  try {
    return await framesOf(file, frames);
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
