// Earlier conversations: texts and small previews in this browser, the oldest dropped first. Sends nothing.

import { byId, el, plural } from "./dom.js";
import { keep, kept } from "./keep.js";

const KEPT = "saccade-history";
const MOST = 30; // conversations
const MOST_CHARS = 1_000_000; // of all; browsers allow about five million
const PREVIEW = 64; // pixels along the longer side

export class History {
  // `onOpen` gets a conversation that was chosen.
  constructor(onOpen) {
    this.onOpen = onOpen;
  }

  start() {
    byId("history-open").addEventListener("click", () => {
      this.#show();
      byId("history").showModal();
    });
    byId("history-close").addEventListener("click", () => byId("history").close());
    byId("history-clear").addEventListener("click", () => this.#write([]));
  }

  // A conversation as it stands: {id, at, turns: [{question, answer, previews}]}. Other tabs may have written since.
  put(conversation) {
    this.#write([conversation, ...this.#all().filter(({ id }) => id !== conversation.id)]);
  }

  #all() {
    const all = kept(KEPT, []);
    return Array.isArray(all) ? all : [];
  }

  #write(list) {
    let rest = list.slice(0, MOST);
    while (rest.length && (JSON.stringify(rest).length > MOST_CHARS || !keep(KEPT, rest))) rest = rest.slice(0, -1);
    keep(KEPT, rest);
    this.#show();
  }

  #show() {
    const all = this.#all();
    byId("history-clear").disabled = all.length === 0;
    const none = el("li", { className: "quiet" }, "Nothing yet. A conversation is kept once it has an answer.");
    byId("history-list").replaceChildren(...(all.length ? all.map((one) => this.#line(one)) : [none]));
  }

  #line(conversation) {
    const { id, at, turns } = conversation;
    const title = turns[0].question;
    const note = `${new Date(at).toLocaleString()} · ${plural(turns.length, "question")}`;
    const open = () => {
      byId("history").close();
      this.onOpen(conversation);
    };
    const words = el("span", {}, el("b", {}, title), el("small", {}, note));
    const choose = { type: "button", className: "kept", on: { click: open } };
    const remove = { type: "button", className: "round", ariaLabel: `Delete ${title}` };
    remove.on = { click: () => this.#write(this.#all().filter((one) => one.id !== id)) };
    return el("li", {}, el("button", choose, ...previewsOf(turns[0].previews), words), el("button", remove, "✕"));
  }
}

export function previewsOf(previews) {
  return previews.filter((url) => url.startsWith("data:image/")).map((src) => el("img", { src, alt: "" }));
}

// A small JPEG of a picture that this browser can show; null of others.
export function previewOf({ bitmap }) {
  if (!bitmap) return null;
  const scale = Math.min(1, PREVIEW / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, width, height);
  pen.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.7);
}
