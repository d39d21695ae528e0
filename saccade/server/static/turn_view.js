// A question with its answer in the log: thinking folded, marks for what was cut, what it took, and what can be copied.

import { copyButton } from "./clipboard.js";
import { costOf } from "./cost.js";
import { byId, el, plural } from "./dom.js";
import { previewsOf } from "./history.js";
import { asCurl, asPython } from "./snippets.js";

export class TurnView {
  text = "";
  thought = "";
  #thinking = null; // its fold, once there is any

  constructor({ question, media, previews = [], schema = null }) {
    const pictures = previewsOf(previews);
    const note = media ? [el("span", {}, ...pictures, `with ${media}`)] : [];
    const format = schema ? [schemaFold(schema)] : [];
    const asked = el("div", { className: "asked" }, question, ...note, ...format);
    this.said = el("p", { className: schema ? "said json waiting" : "said waiting" });
    this.turn = el("article", { className: "turn" }, asked, this.said);
    byId("welcome").hidden = true;
    byId("log").append(this.turn);
    this.#follow();
  }

  add(text) {
    if (!this.text) this.#thinking?.close();
    this.text += text;
    this.said.textContent = this.text;
    this.#follow();
  }

  think(text) {
    this.#thinking ??= new Thinking(this.said);
    this.thought += text;
    this.#thinking.show(this.thought);
    this.#follow();
  }

  finish(bill, tokens) {
    this.turn.append(costOf(bill, tokens));
    this.#follow();
  }

  end(note) {
    this.said.classList.remove("waiting");
    this.#thinking?.close();
    if (note) this.said.after(el("p", { className: "cut" }, note));
  }

  // `request`: what snippets.js makes a program of.
  offer(request) {
    const copies = [
      copyButton("Copy", () => this.text),
      copyButton("Copy as curl", () => asCurl(request)),
      copyButton("Copy as Python", () => asPython(request)),
    ];
    this.turn.append(el("div", { className: "copies" }, ...copies));
    this.#follow();
  }

  remove() {
    this.turn.remove();
    byId("welcome").hidden = Boolean(byId("log").querySelector(".turn"));
  }

  // On wide screens the log scrolls, on narrow ones the page.
  #follow() {
    this.turn.scrollIntoView({ block: "end" });
  }
}

function schemaFold(schema) {
  const keys = Object.keys(schema.properties ?? {}).join(", ");
  const summary = el("summary", {}, keys ? `answered as JSON: ${keys}` : "answered as JSON");
  return el("details", {}, summary, el("pre", {}, JSON.stringify(schema, null, 2)));
}

class Thinking {
  #began = performance.now();
  #summary = el("summary", {}, "Thinking …");
  #text = el("p", {});
  #isOpen = true; // it still comes

  constructor(before) {
    before.before(el("details", { className: "thinking" }, this.#summary, this.#text));
  }

  show(text) {
    this.#text.textContent = text;
  }

  close() {
    if (!this.#isOpen) return;
    this.#isOpen = false;
    this.#summary.textContent = `Thought for ${((performance.now() - this.#began) / 1000).toFixed(1)} s`;
  }
}

export function mediaWords(pictures) {
  const videos = pictures.filter(({ kind }) => kind === "video").length;
  const images = pictures.length - videos;
  return [images && plural(images, "picture"), videos && plural(videos, "video")].filter(Boolean).join(" and ");
}

export function clearLog() {
  for (const turn of byId("log").querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
}
