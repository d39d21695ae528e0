// One question after the other: streams the answer into the log, can be stopped, and gives a failed question back.

import { byId, count } from "./dom.js";
import { TurnView } from "./turn_view.js";

const EMPTY = "The model answered with nothing. Ask in other words.";

export class Talk {
  #running = null; // the AbortController of the answer that is being streamed

  // `request` gives what is sent for a turn: {body, ...}, as snippets.js takes it.
  constructor(api, conversation, { request, onDone, onProblem }) {
    Object.assign(this, { api, conversation, request, onDone, onProblem });
  }

  get isBusy() {
    return this.#running !== null;
  }

  async ask(turn) {
    this.#running = new AbortController();
    const view = new TurnView(turn);
    const request = this.request(turn);
    this.#toggle(true);
    try {
      const reason = await this.#stream(request.body, view);
      this.#keep(turn, view, request, reason === "length" ? cutWords(request) : "");
    } catch (error) {
      if (error.name === "AbortError") this.#keep(turn, view, request, "stopped");
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

  // Returns why the answer ended.
  async #stream(asked, view) {
    const body = { ...asked, include_bill: true, stream_options: { include_usage: true } };
    let reason = null;
    for await (const event of this.api.stream("v1/chat/completions", body, this.#running.signal)) {
      const { delta, finish_reason: end } = event.choices[0] ?? {};
      const thought = delta?.reasoning_content ?? delta?.reasoning;
      if (thought) view.think(thought);
      if (delta?.content) view.add(delta.content);
      if (event.bill) view.finish(event.bill, event.usage.completion_tokens);
      reason ??= end ?? null;
    }
    return reason;
  }

  #keep(turn, view, request, note) {
    view.end(note);
    if (!view.text && !view.thought) {
      view.remove();
      this.onProblem(note ? null : new Error(EMPTY), turn);
      return;
    }
    view.offer(request);
    turn.answer = view.text;
    this.conversation.turns.push(turn);
  }

  // What was said so far stays to be read, but the conversation goes on as if it had not been asked.
  #fail(turn, view, error) {
    view.end("broken off");
    if (!view.text && !view.thought) view.remove();
    this.onProblem(error, turn);
  }

  #toggle(isBusy) {
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("log").ariaBusy = String(isBusy); // a screen reader reads the whole answer, not every word of it
  }
}

function cutWords({ body, isRoom }) {
  const cut = `Cut off after ${count(body.max_tokens)} tokens:`;
  if (isRoom) return `${cut} the context is full. Start over, or send fewer or smaller pictures.`;
  return `${cut} the length set. A larger one is in the settings.`;
}
