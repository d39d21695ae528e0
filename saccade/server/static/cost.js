// What an answer took: the way to its first token in parts, and what the caches saved. Made from the answer's bill.

import { count, el, ms, plural, rail } from "./dom.js";

const STAGES = ["fetch", "prepare", "queue", "decode", "encode", "prefill"];

export function costOf(bill, tokens) {
  const stages = stagesOf(bill.times_ms);
  const first = stages.reduce((sum, { value }) => sum + value, 0);
  const seconds = (bill.times_ms.total - bill.times_ms.first_token) / 1000;
  const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
  const size = `${plural(tokens, "token")} in the answer${speed}`;
  return el("div", { className: "cost" },
    el("p", {}, el("strong", {}, `First token after ${ms(first)}`), el("span", { className: "quiet" }, size)),
    rail(stages, first, stages.map(({ name, value }) => `${name} ${ms(value)}`).join(", ")),
    el("div", { className: "legend" }, ...stages.map(stageLabel)),
    el("ul", { className: "caches", ariaLabel: "What the caches saved" }, ...caches(bill)));
}

// `prepare` as the server counts it holds the fetching; here every moment stands once.
function stagesOf(given) {
  const value = { ...given, prepare: given.prepare - given.fetch };
  return STAGES.map((name) => ({ name, value: Math.max(0, value[name] ?? 0) }));
}

function stageLabel({ name, value }) {
  return el("span", { className: `key ${name}${value ? "" : " zero"}` }, `${name} ${ms(value)}`);
}

function caches(bill) {
  const cached = bill.items.filter((item) => item.cached).length;
  const fresh = bill.items.length - cached;
  const notes = [];
  if (cached) notes.push(note(`${pictures(cached, bill)}: not decoded, not encoded again`, true));
  if (fresh) notes.push(note(`${pictures(fresh, bill)}: decoded and encoded`, false));
  const found = `${count(bill.cached_tokens)} of ${count(bill.prompt_tokens)} prompt tokens from the prefix cache`;
  notes.push(note(bill.cached_tokens ? found : "prefix cache: nothing found", bill.cached_tokens > 0));
  return notes;
}

function pictures(number, bill) {
  const noun = bill.items.every((item) => item.kind === "video") ? "video" : "picture";
  return bill.items.length === 1 ? noun : plural(number, noun);
}

function note(text, isHit) {
  return el("li", { className: isHit ? "hit" : "" }, isHit ? `✓ ${text}` : text);
}
