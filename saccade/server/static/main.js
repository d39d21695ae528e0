// Puts the page together: who hears of whose changes. What is shown and how is in the modules it joins.

import { hintFor, questionsFor, showAbout } from "./about.js";
import { Api } from "./api.js";
import { BillWatch, showBill } from "./bill.js";
import { Conversation, pictureAt } from "./conversation.js";
import { byId, count, el, show } from "./dom.js";
import { EngineView } from "./engine.js";
import { History, previewOf } from "./history.js";
import { takeFiles } from "./intake.js";
import { Pictures } from "./pictures.js";
import { Planner } from "./plan.js";
import { SAMPLE_NAMES, sampleFiles } from "./sample.js";
import { showServer } from "./server_view.js";
import { Settings } from "./settings.js";
import { followTabs, shownTab } from "./tabs.js";
import { Talk } from "./talk.js";
import { followTheme } from "./theme.js";
import { clearLog, mediaWords, TurnView } from "./turn_view.js";
import { showLarge, showThumbs } from "./view.js";

const STATES = {
  ready: "",
  connecting: "",
  locked: "",
  starting: "The model is being loaded. You can add pictures meanwhile.",
  restarting: "The engine stopped and is being started again. Nothing is lost here; ask again in a moment.",
  draining: "The server is shutting down and takes no new questions.",
  stopped: "The engine has stopped. Nothing is lost here; the server's log says why.",
  lost: "The server does not answer. Nothing is lost here; this page keeps trying.",
};

const WRONG_SCHEMA = "The JSON schema in the settings is no JSON object.";

class Page {
  #sample = 0; // the next one
  #samplesAsked = 0;
  #suggested = null;
  #billed = new Map(); // where each picture stands on the bill that is being asked for, in its order
  #priced = []; // ids of the pictures on the latest that came
  #problems = { talk: "", bill: "" }; // what the latest answer and the latest bill ran into
  #left = []; // a sentence for each file that was not added
  #returned = null; // the latest turn that got no answer
  #state = "connecting";
  card = null; // of the model, once the server has told

  constructor() {
    this.api = new Api();
    this.pictures = new Pictures();
    this.conversation = new Conversation();
    this.settings = new Settings(() => this.bill.touch());
    this.history = new History((kept) => this.#reopen(kept));
    this.bill = new BillWatch(this.api, () => this.#billBody(), {
      chars: () => this.pictures.good.reduce((sum, { url }) => sum + url.length, 0),
      onBill: (bill) => this.#onBill(bill),
      onProblem: (problem) => this.#onBillProblem(problem),
    });
    this.talk = new Talk(this.api, this.conversation, {
      request: (turn) => this.#request(turn),
      onDone: () => this.#afterAnswer(),
      onProblem: (problem, turn) => this.#onTalkProblem(problem, turn),
    });
    this.planner = new Planner(this.api);
    this.engine = new EngineView(this.api, { onState: (state, engine) => this.#onState(state, engine) });
  }

  start() {
    followTheme(byId("theme"));
    takeFiles((files) => (this.planner.isShown ? this.planner.addFiles(files) : this.#addFiles(files)));
    this.pictures.addEventListener("change", () => this.#onPictures());
    this.pictures.addEventListener("select", () => this.#showPictures());
    byId("sample").addEventListener("click", () => this.#addSample(this.#sample));
    byId("samples").append(...SAMPLE_NAMES.map((name, index) => pill(name, () => this.#addSample(index))));
    byId("detail").addEventListener("change", () => this.#onLimits());
    byId("pixels").addEventListener("input", () => this.#onPixels());
    byId("max-frames").addEventListener("input", () => this.#onLimits());
    byId("new").addEventListener("click", () => this.#startOver());
    byId("stop").addEventListener("click", () => this.talk.stop());
    byId("key-form").addEventListener("submit", (event) => this.#onKey(event));
    this.#watchComposer();
    this.settings.start();
    this.history.start();
    this.planner.start();
    followTabs(() => this.planner.turn());
    this.engine.run();
  }

  // --- what would be sent ---

  #body(turn) {
    const how = { detail: byId("detail").value, system: this.settings.system };
    const { messages, ids } = this.conversation.messages(turn, this.pictures.good, how);
    turn.ids = ids;
    const limits = this.#limits();
    return { messages, ...(Object.keys(limits).length ? { mm_processor_kwargs: limits } : {}) };
  }

  // As it is sent, with what a program needs to send it again.
  #request(turn) {
    const room = this.bill.latest?.max_tokens_left;
    const fields = this.settings.fields(room);
    return {
      body: { model: this.card?.id, ...this.#body(turn), ...fields, ...formatOf(turn.schema) },
      isRoom: fields.max_tokens === room,
      files: new Map(this.pictures.good.map(({ url, name }) => [url, name])),
      base: new URL("v1", location.href).href,
      hasKey: Boolean(this.api.key),
    };
  }

  #billBody() {
    const turn = this.conversation.next(byId("question").value.trim(), this.pictures.good);
    const body = this.#body(turn);
    this.#billed = turn.ids;
    return body.messages.some(({ role }) => role === "user") ? body : null;
  }

  #limits() {
    const pixels = this.#maxPixels();
    const frames = byId("max-frames");
    const hasVideo = this.pictures.good.some(({ kind }) => kind === "video");
    return {
      ...(pixels ? { max_pixels: pixels } : {}),
      ...(hasVideo && frames.value && frames.validity.valid ? { max_frames: Number(frames.value) } : {}),
    };
  }

  // The slider goes along the side of a square, which is how people think of sizes; null: the server's own limit.
  #maxPixels() {
    const slider = byId("pixels");
    return slider.value === slider.max ? null : Number(slider.value) ** 2;
  }

  #onPixels() {
    byId("pixels-value").textContent = count(this.#maxPixels() ?? this.card.multimodal.max_pixels);
    this.#onLimits();
  }

  #onLimits() {
    this.pictures.forgive();
    this.bill.touch();
  }

  // --- pictures and their bill ---

  async #addFiles(files) {
    this.#left = await this.pictures.add(files, this.#taken());
    this.#showPictures();
  }

  // What the server takes. Before it has told, the bill is what refuses.
  #taken() {
    const known = this.card?.multimodal;
    const body = 0.74 * (known?.max_body_bytes ?? Infinity); // three bytes are four characters of base64
    return {
      frames: Math.max(1, Number(byId("frames").value) || 1),
      most: { image: known?.limit_per_prompt.image ?? Infinity, video: this.#mostVideos() },
      maxBytes: {
        image: Math.min(body, known?.max_image_bytes ?? Infinity),
        video: Math.min(body, known?.video?.max_bytes ?? Infinity),
      },
      formats: known?.formats ?? ["JPEG", "PNG", "WebP"],
    };
  }

  // None where the server lacks what it reads video files with.
  #mostVideos() {
    const { video, limit_per_prompt: limits } = this.card?.multimodal ?? {};
    return video?.formats.length ? limits.video : 0;
  }

  // In the place of another sample; beside pictures of the user's own. The latest asked for is the one that comes.
  async #addSample(index) {
    this.#sample = index + 1;
    this.#samplesAsked += 1;
    const place = this.#samplesAsked;
    try {
      const files = await sampleFiles(index, this.api);
      await this.pictures.settled;
      if (place !== this.#samplesAsked) return;
      if (this.pictures.isSample && !this.talk.isBusy) this.#clear();
      await this.#addFiles(files);
    } catch (problem) {
      if (place !== this.#samplesAsked) return;
      this.#left = [problem.message];
      this.#showPictures();
    }
  }

  #clear() {
    this.pictures.clear();
    if (this.conversation.turns.length) this.#startOver();
  }

  #onPictures() {
    this.#left = [];
    this.#showPictures();
    this.bill.touch();
  }

  #showPictures() {
    const items = new Map(this.bill.latest?.items.map((item, index) => [this.#priced[index], item]));
    showThumbs(this.pictures, items);
    showLarge(this.pictures.shown, items.get(this.pictures.shown?.id));
    show(byId("pictures-problem"), [...this.#left, ...this.pictures.problems].join(" "));
    const hasVideo = this.pictures.list.some(({ kind }) => kind === "video");
    byId("pictures").classList.toggle("has-video", hasVideo);
    show(byId("hint"), hintFor(this.pictures.good, this.card));
    this.#suggest(questionsFor(this.pictures.shown, this.card));
  }

  #onBill(bill) {
    this.#priced = [...this.#billed.values()];
    const names = new Map(this.pictures.list.map(({ id, name }) => [id, name]));
    this.#tell("bill", "");
    showBill(bill, this.#priced.map((id) => names.get(id)));
    this.#showPictures();
  }

  // The latest bill stays, faded. While the server is away, the notice above says why it is not newer.
  #onBillProblem(problem) {
    if (problem.status !== 0 && problem.status < 500) this.#placeProblem(problem, "bill", this.#billed);
  }

  // Near what caused it: a picture's trouble with the pictures, everything else with the question.
  #placeProblem(problem, whose, ids) {
    const id = pictureAt(problem.param, ids);
    if (id !== null && this.pictures.refuse(id, problem.message)) this.bill.touch();
    else this.#tell(whose, problem.message);
    this.#showPictures();
  }

  // A bill is asked for at every change and must not wipe away what became of the question.
  #tell(whose, message) {
    this.#problems[whose] = message;
    show(byId("talk-problem"), this.#problems.talk || this.#problems.bill);
  }

  // --- conversation ---

  #watchComposer() {
    const question = byId("question");
    question.addEventListener("input", () => {
      fitHeight(question);
      this.bill.touch();
    });
    question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.talk.stop();
    });
  }

  // `brought`: the schema of a sample's question. It stays with a question that came back.
  #ask(brought = null) {
    const text = byId("question").value.trim();
    if (!text || this.talk.isBusy) return;
    const own = brought ?? (this.#returned?.question === text ? this.#returned.brought : null);
    this.#tell("bill", "");
    const isWrong = !own && this.settings.isSchemaWrong;
    this.#tell("talk", isWrong ? WRONG_SCHEMA : "");
    if (isWrong) return;
    this.#returned = null;
    this.#write("");
    const schemas = { brought: own, schema: own ?? this.settings.schema };
    const turn = Object.assign(this.conversation.next(text, this.pictures.good), schemas);
    const shown = this.pictures.good.filter(({ id }) => turn.pictures.includes(id));
    this.talk.ask(Object.assign(turn, { media: mediaWords(shown), previews: shown.map(previewOf).filter(Boolean) }));
  }

  // A question without an answer goes back to where it was typed, unless something new stands there.
  #onTalkProblem(problem, turn) {
    this.#returned = turn;
    if (!byId("question").value) this.#write(turn.question);
    if (problem) this.#placeProblem(problem, "talk", turn.ids);
  }

  #afterAnswer() {
    const { id, turns } = this.conversation;
    byId("new").disabled = turns.length === 0;
    this.bill.touch();
    if (!turns.length) return;
    const texts = turns.map(({ question, answer, media, previews }) => ({ question, answer, media, previews }));
    this.history.put({ id, at: Date.now(), turns: texts });
  }

  // Texts alone come back; pictures that are here now go with the next question.
  #reopen({ id, turns }) {
    if (this.talk.isBusy) return;
    this.#startOver();
    Object.assign(this.conversation, { id, turns: turns.map((turn) => ({ ...turn, pictures: [] })) });
    for (const turn of turns) {
      const view = new TurnView(turn);
      view.add(turn.answer);
      view.end(turn.media ? "Its pictures were not kept: add them again to ask more about them." : "");
    }
    byId("new").disabled = false;
    this.bill.touch();
  }

  #startOver() {
    this.conversation.clear();
    clearLog();
    this.#tell("talk", "");
    byId("new").disabled = true;
    this.bill.touch();
    byId("question").focus();
  }

  #suggest(questions) {
    const texts = questions.map(({ text }) => text).join();
    if (texts === this.#suggested) return; // or a button would lose the focus at every bill
    this.#suggested = texts;
    byId("suggestions").hidden = questions.length === 0;
    byId("suggestions").replaceChildren(...questions.map((one) => pill(one.text, () => this.#use(one))));
  }

  #use({ text, schema }) {
    if (this.talk.isBusy) return;
    this.#write(text);
    byId("question").focus();
    this.#ask(schema);
  }

  #write(text) {
    byId("question").value = text;
    fitHeight(byId("question"));
  }

  // --- the server ---

  #onState(state, engine) {
    if (engine && shownTab() === "server") showServer(engine, this.card);
    if (state === this.#state) return;
    this.#state = state;
    const pill = byId("state");
    pill.dataset.state = state;
    pill.textContent = { lost: "not reachable", locked: "key needed" }[state] ?? state;
    show(byId("notice"), STATES[state] ?? "");
    byId("key-form").hidden = state !== "locked";
    if (state === "locked" && this.api.key) {
      byId("key-note").textContent = "The server does not know this key; try another.";
    }
    if (state === "ready") this.#onReady();
  }

  async #onReady() {
    try {
      const { data } = await this.api.get("v1/models");
      this.#onCard(data[0]);
      this.planner.onReady();
    } catch {
      this.#state = "connecting"; // it went away in between; the next look tries again
    }
  }

  #onCard(card) {
    byId("model").textContent = `${card.id} · ${count(card.max_model_len)} tokens of context`;
    const { min_pixels: least, max_pixels: most, limit_per_prompt: limits } = card.multimodal;
    byId("pictures").classList.toggle("text-only", limits.image === 0);
    showAbout(card, byId("about"));
    this.settings.onCard(card);
    const [min, max] = [Math.ceil(Math.sqrt(least)), Math.floor(Math.sqrt(most))];
    Object.assign(byId("pixels"), { min, max, disabled: least === most });
    if (!this.card) byId("pixels").value = max; // after a restart the choice stays
    this.card = card;
    byId("pictures").classList.toggle("takes-video", this.#mostVideos() > 0);
    this.#showPictures();
    this.#onPixels();
  }

  #onKey(event) {
    event.preventDefault();
    this.api.key = byId("key").value;
    this.#state = "connecting"; // so that a wrong key asks again
    this.engine.look();
  }
}

function pill(text, onClick) {
  return el("button", { type: "button", on: { click: onClick } }, text);
}

function formatOf(schema) {
  return schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {};
}

function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

new Page().start();
