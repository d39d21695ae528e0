// The tab "Plan": what is asked of the server, and when. How an answer is shown is in plan_view.js.

import { byId, el, plural, show, times } from "./dom.js";
import { showHour, showPlan } from "./plan_view.js";
import { shownTab } from "./tabs.js";

const PAUSE_MS = 300; // after the last change
const HOUR_EVERY_MS = 5000;
const SIZE = /^\s*([1-9]\d{0,4})\s*[x×*]\s*([1-9]\d{0,4})\s*$/i;

export class Planner {
  #isReady = false; // the server has answered
  #options = null; // GPUs and limits, once the server has told
  #sizes = new Map(); // "WIDTHxHEIGHT" -> images that have it
  #plan = null; // the latest
  #hour = null;
  #timer = 0;
  #asking = new AbortController();

  constructor(api) {
    this.api = api;
  }

  get isShown() {
    return shownTab() === "plan";
  }

  start() {
    const files = byId("plan-files");
    byId("plan-pick").addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.addFiles([...files.files]);
      files.value = "";
    });
    byId("size-form").addEventListener("submit", (event) => this.#onSize(event));
    byId("plan-form").addEventListener("input", () => this.#touch());
    byId("plan-form").addEventListener("submit", (event) => event.preventDefault());
    byId("gpu").addEventListener("change", () => this.#showNumbers());
    byId("plan-hour").addEventListener("click", () => this.#useHour());
    this.#showSizes();
    setInterval(() => this.#lookAtHour(), HOUR_EVERY_MS);
  }

  // The server answers, or answers again.
  onReady() {
    this.#isReady = true;
    this.turn();
  }

  // The address may have turned to the plan.
  async turn() {
    if (!this.isShown || !this.#isReady) return;
    try {
      if (!this.#options) this.#onOptions(await this.api.get("v1/plan/options"));
    } catch (problem) {
      this.#tell(problem);
      return;
    }
    this.#touch(0);
    this.#lookAtHour();
  }

  // Reads the sizes alone.
  async addFiles(files) {
    const problems = [];
    for (const file of files) {
      try {
        const { width, height } = await sizeOf(file);
        this.#addSize(`${width}x${height}`);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.#onSizes(problems.join(" "));
  }

  // --- what is asked ---

  #onOptions(options) {
    this.#options = options;
    const words = ({ name, memory_gib: memory }) => `${name}, ${Math.round(memory)} GiB`;
    byId("gpu").replaceChildren(...options.gpus.map((gpu) => el("option", { value: gpu.id }, words(gpu))));
    byId("gpu").value = options.default_gpu;
    field("images").value = Math.min(1, options.max_images);
    byId("plan-part").classList.toggle("no-images", options.max_images === 0);
    this.#showNumbers();
  }

  #showNumbers() {
    const gpu = this.#options?.gpus.find(({ id }) => id === byId("gpu").value);
    if (!gpu) return;
    field("gpu_memory_gib").placeholder = gpu.memory_gib;
    field("gpu_bandwidth").placeholder = gpu.bandwidth_gb_s;
    field("gpu_tflops").placeholder = gpu.tflops;
  }

  #body() {
    const body = { gpu: byId("gpu").value, image: [...this.#sizes].map(([size, images]) => `${size}:${images}`) };
    for (const input of byId("plan-form").querySelectorAll("input")) {
      if (!input.validity.valid) throw atFault(input);
      if (input.value) body[input.name] = Number(input.value);
    }
    if (body.repeated) body.repeated /= 100;
    return body;
  }

  #touch(pause = PAUSE_MS) {
    if (!this.#options) return;
    clearTimeout(this.#timer);
    this.#asking.abort();
    byId("plan-figures").classList.add("old");
    this.#timer = setTimeout(() => this.#ask(), pause);
  }

  async #ask() {
    this.#asking = new AbortController();
    try {
      this.#plan = { asked: this.#body() };
      this.#plan.found = await this.api.post("v1/plan", this.#plan.asked, this.#asking.signal);
    } catch (problem) {
      if (problem.name !== "AbortError") this.#tell(problem);
      return;
    }
    this.#tell(null);
    showPlan(byId("plan-figures"), this.#plan.found, this.#plan.asked);
    this.#showHour();
  }

  // The latest plan stays, faded, under the sentence. The field at fault is marked.
  #tell(problem) {
    show(byId("plan-problem"), problem?.message ?? "");
    for (const input of byId("plan-part").querySelectorAll("input, select")) {
      input.ariaInvalid = problem?.param && input.name === problem.param ? "true" : null;
    }
  }

  // --- sizes of images ---

  #onSize(event) {
    event.preventDefault();
    const given = byId("size").value;
    const found = SIZE.exec(given);
    if (!found) {
      show(byId("size-problem"), `“${given}” is no size. Write width x height, such as 1280x720.`);
      return;
    }
    byId("size").value = "";
    try {
      this.#addSize(`${found[1]}x${found[2]}`);
      this.#onSizes("");
    } catch (error) {
      this.#onSizes(error.message);
    }
  }

  #addSize(size) {
    const most = this.#options?.max_sizes ?? Infinity;
    if (!this.#sizes.has(size) && this.#sizes.size >= most) {
      throw new Error(`A plan takes ${most} sizes; ${size} was left out.`);
    }
    this.#sizes.set(size, (this.#sizes.get(size) ?? 0) + 1);
  }

  #onSizes(problem) {
    show(byId("size-problem"), problem);
    this.#showSizes();
    this.#touch();
  }

  #showSizes() {
    const chips = [...this.#sizes].map(([size, images]) => {
      const words = `${times(...size.split("x").map(Number))} · ${plural(images, "image")}`;
      const remove = () => {
        this.#sizes.delete(size);
        this.#onSizes("");
      };
      const button = { type: "button", ariaLabel: `Remove ${size}`, on: { click: remove } };
      return el("li", {}, el("span", {}, words), el("button", button, "✕"));
    });
    const none = el("li", { className: "quiet" }, "Without any, 1,280 × 720 is planned.");
    byId("sizes").replaceChildren(...(chips.length ? chips : [none]));
  }

  // --- the last hour ---

  async #lookAtHour() {
    if (!this.isShown || document.visibilityState !== "visible") return;
    try {
      this.#hour = await this.api.get("v1/plan/measured");
    } catch {
      return; // the page says elsewhere that the server is away
    }
    this.#showHour();
  }

  #showHour() {
    if (!this.#hour) return;
    byId("plan-hour").disabled = !this.#hour.requests;
    showHour(byId("hour"), this.#hour, this.#plan?.found && this.#plan);
  }

  #useHour() {
    const { per_request: mean, max_requests_per_s: rate } = this.#hour;
    field("images").value = Math.min(Math.round(mean.images), this.#options.max_images);
    field("input_tokens").value = Math.max(1, Math.round(mean.text_tokens));
    field("output_tokens").value = Math.round(mean.output_tokens);
    field("rate").value = Math.max(0.001, Number(rate.toPrecision(3)));
    this.#touch(0);
  }
}

function field(name) {
  return byId("plan-form").elements[name];
}

// In the browser's own words.
function atFault(input) {
  const message = `${input.labels[0].textContent.trim()}: ${input.validationMessage}`;
  return Object.assign(new Error(message), { param: input.name });
}

// An image that is not shown: browsers read its size without decoding all of its pixels.
async function sizeOf(file) {
  const image = new Image();
  image.src = URL.createObjectURL(file);
  try {
    await new Promise((resolve, reject) => Object.assign(image, { onload: resolve, onerror: reject }));
    if (!image.naturalWidth) throw new Error("an image without a size");
    return { width: image.naturalWidth, height: image.naturalHeight };
  } catch {
    throw new Error(`${file.name} is no image that this browser can read; add its size by hand.`);
  } finally {
    URL.revokeObjectURL(image.src);
  }
}
