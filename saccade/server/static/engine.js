// The live view of the engine: asks for its numbers while the tab is seen, and draws them. Starts and stops nothing.

import { byId, count, el, plural, rail, svg } from "./dom.js";

const EVERY_MS = 500;
const STEPS = 60;
const HEIGHT = 52; // of the strip, as its CSS has it
const MARK = 4; // height kept free for the mark of an encoding
const LOOKS = 5; // looks over which the speed is averaged

export class EngineView {
  #seen = []; // {at, answer}: the latest looks

  constructor(api, { onState }) {
    Object.assign(this, { api, onState });
  }

  async run() {
    for (;;) {
      if (document.visibilityState === "visible") await this.look();
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }

  async look() {
    try {
      const engine = await this.api.get("v1/engine");
      if (engine.stats.kv) this.#show(engine);
      this.onState(engine.state, engine);
    } catch (problem) {
      this.onState(problem.status === 401 ? "locked" : "lost");
    }
  }

  #show({ stats, tokens, recent_steps: steps }) {
    byId("running").textContent = count(stats.running);
    byId("waiting").textContent = count(stats.waiting);
    byId("speed").textContent = this.#speed(tokens.answer).toFixed(0);
    const { kv, encoder_cache: cache } = stats;
    const blocks = [{ name: "used", value: kv.used }, { name: "idle", value: kv.idle }];
    const held = `${count(kv.used)} used, ${count(kv.idle)} cached of ${count(kv.total)}`;
    showMeter("kv", "KV blocks", held, blocks, kv.total);
    const embeddings = [{ name: "picture", value: cache.slots_used }];
    const kept = `${count(cache.slots_used)} of ${count(cache.slots_total)} embeddings`;
    showMeter("encoder", "Encoder cache", kept, embeddings, cache.slots_total);
    showSteps(steps.slice(-STEPS));
  }

  #speed(answer) {
    const now = performance.now();
    this.#seen = [...this.#seen, { at: now, answer }].slice(-LOOKS);
    const { at, answer: before } = this.#seen[0];
    return now > at ? Math.max(0, (1000 * (answer - before)) / (now - at)) : 0;
  }
}

function showMeter(id, title, text, parts, whole) {
  const words = el("p", {}, el("span", {}, title), el("span", {}, text));
  byId(id).replaceChildren(words, rail(parts, whole, `${title}: ${text}`));
}

// One column a step. Heights grow with the square root, or a decode of one token beside a prefill would not be seen.
function showSteps(steps) {
  const strip = byId("steps");
  const total = ({ decode_tokens: a, text_tokens: b, image_tokens: c }) => a + b + c;
  const most = Math.max(16, ...steps.map(total));
  const columns = steps.flatMap((step, i) => {
    const height = (HEIGHT - MARK - 2) * Math.sqrt(total(step) / most);
    return column(step, STEPS - steps.length + i, height / Math.max(1, total(step)));
  });
  strip.setAttribute("viewBox", `0 0 ${STEPS} ${HEIGHT}`);
  strip.ariaLabel = summary(steps);
  strip.replaceChildren(...columns);
}

function column(step, x, perToken) {
  const parts = [["answer", step.decode_tokens], ["text", step.text_tokens], ["picture", step.image_tokens]];
  const marks = [svg("rect", { class: "tick", x, y: HEIGHT - 1, width: 0.8, height: 1 })];
  let y = HEIGHT;
  for (const [name, tokens] of parts) {
    y -= tokens * perToken;
    if (tokens) marks.push(svg("rect", { class: name, x, y, width: 0.8, height: tokens * perToken }));
  }
  if (step.encodes) marks.push(svg("rect", { class: "encode", x, y: 0, width: 0.8, height: MARK - 1 }));
  return marks;
}

function summary(steps) {
  const sum = (name) => steps.reduce((total, step) => total + step[name], 0);
  const encoding = steps.filter((step) => step.encodes).length;
  const answers = plural(sum("decode_tokens"), "answer token");
  const prompts = `${count(sum("text_tokens"))} of text, ${count(sum("image_tokens"))} of pictures`;
  return `The last ${plural(steps.length, "step")}: ${answers}, ${prompts}, ${plural(encoding, "step")} with encoding`;
}
