// Shows a plan, and the server's last hour beside it. Asks for nothing.

import { count, el, ms, percent, plural, rail, table, times } from "./dom.js";

const GIB = 2 ** 30;
const MEMORY = { // parts of the memory in plain words, in the order of the bar
  weights: "weights",
  kv: "KV cache",
  states: "recurrent states",
  embeddings: "image embeddings",
  images: "encoding",
  work: "working memory",
  graphs: "CUDA graphs",
  staging: "staging",
  spare: "spare",
};
const STAGES = { queue: "wait", preprocess: "decode and resize", encode: "encode", prefill: "prefill" };
const LIMITS = { // what a plan can be limited by
  "KV cache": "the memory of the KV cache",
  "encoder cache": "the memory of the encoder cache",
  max_num_seqs: "the requests that may run at once (max_num_seqs)",
  encode: "the time the GPU takes to encode images",
  prefill: "the time the GPU takes for prefill",
  decode: "the time the GPU takes for decode",
  "image decoding on the host": "the time the host takes to decode images",
  "first-token service level": "the time allowed for the first token",
  "between-tokens service level": "the time allowed between tokens",
};
const CHANGES = { // what an option means
  "--max-pixels": "Half the pixels",
  "--encoder-cache-gb": "A larger encoder cache",
  "--encoders": "Encoders on GPUs of their own",
  "--embedding-dir": "Embeddings kept on disk",
  "--embedding-store": "Embeddings in a shared store",
};

export function showPlan(place, plan, asked) {
  place.classList.remove("old");
  place.replaceChildren(
    headline(plan),
    request(plan, asked),
    ...(plan.images.length ? [images(plan)] : []),
    memory(plan),
    firstToken(plan),
    changes(plan),
    el("ul", { className: "notes quiet" }, ...plan.notes.map((note) => el("li", {}, note))));
}

// --- the plan ---

function headline(plan) {
  const { gpu, gpus, rate, requests_per_s: sustained } = plan;
  const needed = gpus === null ? "none" : `${count(gpus)} × ${gpu.name}`;
  const first = plan.ttft_ms.total;
  const figures = [
    [rate ? `for ${number(rate)} requests/s` : "to begin with", needed],
    ["sustains, requests/s", number(sustained)],
    ["first token", ms(first)],
    ["between tokens", ms(plan.itl_ms)],
    ["fit at once", count(plan.concurrent_requests)],
  ];
  const cells = figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("div", {}, el("dl", { className: "numbers lead" }, ...cells), el("p", { id: "plan-words" }, sentence(plan)));
}

function sentence({ gpu, gpus, gpus_per_copy: each, requests_per_s: sustained, bound_by: bound }) {
  const copy = each === 1 ? `One ${gpu.name}` : `A copy of the model over ${each} × ${gpu.name}`;
  const sum = `${copy} sustains ${number(sustained)} requests/s; the limit is ${LIMITS[bound] ?? bound}.`;
  return gpus === null ? `No number of GPUs keeps to these service levels. ${sum}` : sum;
}

function request(plan, { images: given }) {
  const out = plan.request_tokens - plan.prompt_tokens;
  const shown = plan.images.length ? plural(given ?? 1, "image") : "no image";
  const parts = `${count(plan.prompt_tokens)} in with ${shown}, ${count(out)} out`;
  const kept = `${plural(plan.kv_blocks_per_request, "KV block")}, ${megabytes(plan.kv_bytes_per_request)} of KV`;
  return el("p", { className: "quiet" }, `A request has ${plural(plan.request_tokens, "token")} (${parts}): ${kept}.`);
}

function images(plan) {
  const rows = plan.images.map((image) => [
    times(image.width, image.height),
    times(image.resized_width, image.resized_height),
    count(image.tokens),
    count(image.kv_blocks),
    percent(image.share),
  ]);
  return table("Sizes of images", ["image", "resized", "tokens", "KV blocks", "share"], rows);
}

function memory({ memory_bytes: bytes, gpu, gpus_per_copy: gpus }) {
  const whole = gpu.memory_gib * gpus * GIB;
  const parts = Object.keys(MEMORY).filter((name) => bytes[name] > 0);
  const used = parts.reduce((sum, name) => sum + bytes[name], 0);
  const title = `Memory: ${gib(used)} of ${gib(whole)}`;
  return bar(title, parts.map((name) => [`part-${name}`, `${MEMORY[name]} ${gib(bytes[name])}`, bytes[name]]), whole);
}

function firstToken({ ttft_ms: first, ttft_seen_ms: seen, images: sizes }) {
  const p99 = first.total - first.queue + first.queue_p99;
  const before = sizes.length ? `, ${ms(seen)} for images seen before` : "";
  const parts = Object.entries(STAGES).map(([name, words]) => [
    `stage-${name}`, `${words} ${ms(first[name])}`, first[name],
  ]);
  return bar(`First token: ${ms(first.total)} on average, ${ms(p99)} at p99${before}`, parts, first.total);
}

// `parts`: class, words and value of each.
function bar(title, parts, whole) {
  const legend = parts.map(([name, words, value]) => el("span", { className: `key ${name}${value ? "" : " zero"}` }, words));
  const label = `${title}: ${parts.map(([, words]) => words).join(", ")}`;
  return el("div", { className: "bar" },
    el("h3", {}, title),
    rail(parts.map(([name, , value]) => ({ name, value })), whole, label),
    el("div", { className: "legend" }, ...legend));
}

function changes({ alternatives, rate }) {
  const rows = alternatives.map((other) => [
    change(other),
    other.gain === null ? "–" : gain(other.gain),
    other.requests_per_s_a_gpu === undefined ? "–" : number(other.requests_per_s_a_gpu),
    other.ttft_ms === undefined ? "–" : ms(other.ttft_ms),
    rate ? count(other.gpus ?? 0) || "–" : "",
  ]);
  const heads = ["what else could be done", "gain", "requests/s a GPU", "first token", rate ? "GPUs" : ""];
  return table("What would change", heads, rows, "changes");
}

function change({ name, note }) {
  const flag = name.split(" ")[0];
  const words = CHANGES[flag] ?? name;
  const small = [CHANGES[flag] ? name : "", note.replace("see --repeated", "see “Images seen before”")].filter(Boolean);
  return el("span", {}, words, el("small", {}, small.join(" · ")));
}

// --- the last hour ---

// `plan`: the latest with what was asked, or nothing yet.
export function showHour(place, hour, plan) {
  const { per_request: mean, ttft_ms: first, itl_ms: between } = hour;
  const found = plan?.found;
  const p99 = found && found.ttft_ms.total - found.ttft_ms.queue + found.ttft_ms.queue_p99;
  const out = found && found.request_tokens - found.prompt_tokens;
  const perRequest = found?.images.length ? plan.asked.images ?? 1 : 0;
  const text = found && found.prompt_tokens - Math.round(perRequest * found.image_tokens);
  const rows = [
    ["requests/s", found && number(found.rate ?? found.requests_per_s), number(hour.max_requests_per_s)],
    ["first token", found && ms(found.ttft_ms.total), first && ms(first.p50)],
    ["first token, p99", found && ms(p99), first && ms(first.p99)],
    ["between tokens", found && ms(found.itl_ms), between && ms(between.p50)],
    ["between tokens, p99", null, between && ms(between.p99)],
    ["images a request", found && number(perRequest), mean && number(mean.images)],
    ["image tokens", found && number(Math.round(perRequest * found.image_tokens)), mean && number(mean.image_tokens)],
    ["text tokens in", found && number(text), mean && number(mean.text_tokens)],
    ["tokens out", found && number(out), mean && number(mean.output_tokens)],
  ];
  const cells = rows.map((row) => row.map((cell) => cell || "–"));
  const words = el("p", { id: "hour-words", className: "quiet" }, hourWords(hour));
  place.replaceChildren(words, table("The plan and the last hour", ["", "plan", "this server"], cells, "hour"));
}

function hourWords({ requests, seconds }) {
  const minutes = Math.max(1, Math.round(seconds / 60));
  const part = minutes === 1 ? "minute" : `${minutes} minutes`;
  const span = minutes >= 60 ? "the last hour" : `the ${part} since the start`;
  if (!requests) return `No request ended in ${span}.`;
  const ended = `${plural(requests, "request")} ended in ${span}, on this server's own machine.`;
  return `${ended} Requests/s are of the busiest minute, times are medians.`;
}

// --- words ---

function number(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : value >= 0.1 || value === 0 ? 2 : 3;
  return Number(value.toFixed(digits)).toLocaleString("en", { maximumFractionDigits: 3 });
}

function gib(bytes) {
  const value = bytes / GIB;
  return value < 0.05 ? `${(bytes / 2 ** 20).toFixed(value * 1024 < 9.5 ? 1 : 0)} MiB` : `${value.toFixed(1)} GiB`;
}

function megabytes(bytes) {
  return `${number(bytes / 1e6)} MB`;
}

function gain(times) {
  const change = Math.round(100 * (times - 1));
  return `${change < 0 ? "−" : "+"}${Math.abs(change)} %`;
}
