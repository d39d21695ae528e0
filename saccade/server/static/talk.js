// One question after the other: streams the answer into the log, can be stopped, and gives a failed question back.

import { byId, el, plural } from "./dom.js";
import { costOf } from "./cost.js";

const MOST_TOKENS = 512; // for one answer; less where the context has less left

export class Talk {
  #running = null; // the AbortController of the answer that is being streamed

  constructor(api, conversation, { request, onDone, onProblem }) {
    Object.assign(this, { api, conversation, request, onDone, onProblem });
  }

  get isBusy() {
    return this.#running !== null;
  }

  async ask(turn, room) {
    this.#running = new AbortController();
    const view = new TurnView(turn);
    this.#toggle(true);
    try {
      await this.#stream(turn, view, room);
      this.#keep(turn, view);
    } catch (error) {
      if (error.name === "AbortError") this.#keep(turn, view, "stopped");
      else this.#fail(turn, view, error);
    } finally {
      this.#running = null;
      this.#toggle(false);
      this.onDone();
    }
  }

  stop() {
    this.#running?.abort();
  }

  async #stream(turn, view, room) {
    const body = { ...this.request(turn), temperature: 0, include_bill: true, stream_options: { include_usage: true } };
    body.max_tokens = Math.max(1, Math.min(MOST_TOKENS, room ?? MOST_TOKENS));
    let first = 0;
    for await (const event of this.api.stream("v1/chat/completions", body, this.#running.signal)) {
      const text = event.choices[0]?.delta.content;
      if (text) {
        first ||= performance.now();
        view.add(text);
      }
      if (event.bill) view.finish(event.bill, event.usage.completion_tokens, (performance.now() - first) / 1000);
    }
  }

  #keep(turn, view, note = "") {
    view.end(note);
    if (!view.text) {
      view.remove();
      this.onProblem(null, turn);
      return;
    }
    turn.answer = view.text;
    this.conversation.turns.push(turn);
  }

  // What was said so far stays to be read, but the conversation goes on as if it had not been asked.
  #fail(turn, view, error) {
    view.end("broken off");
    if (!view.text) view.remove();
    this.onProblem(error, turn);
  }

  #toggle(isBusy) {
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("log").ariaBusy = String(isBusy); // a screen reader reads the whole answer, not every word of it
  }
}

class TurnView {
  text = "";

  constructor({ question, pictures }) {
    const note = pictures.length ? [el("span", {}, `with ${plural(pictures.length, "picture")}`)] : [];
    this.said = el("p", { className: "said waiting" });
    this.turn = el("article", { className: "turn" }, el("div", { className: "asked" }, question, ...note), this.said);
    this.log = byId("log");
    byId("welcome").hidden = true;
    this.log.append(this.turn);
    this.#follow();
  }

  add(text) {
    this.text += text;
    this.said.textContent = this.text;
    this.#follow();
  }

  finish(bill, tokens, seconds) {
    this.turn.append(costOf(bill, tokens, seconds));
    this.#follow();
  }

  end(note) {
    this.said.classList.remove("waiting");
    if (note) this.turn.append(el("p", { className: "quiet" }, note));
  }

  remove() {
    this.turn.remove();
    byId("welcome").hidden = Boolean(this.log.querySelector(".turn"));
  }

  #follow() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

export function clearLog() {
  for (const turn of byId("log").querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
}
