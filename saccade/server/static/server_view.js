// The tab "Server", for those who run it: version, what became of the requests, cache hit rates, workers.

import { showAbout } from "./about.js";
import { byId, count, el, percent, table } from "./dom.js";

const WORKER = ["role", "state", "device", "node", "pid", "restarts", "running", "waiting"];

// `engine`: as /v1/engine tells. `card`: of the model, once known.
export function showServer(engine, card) {
  showFacts(engine, card);
  showRequests(engine);
  if (engine.stats.kv) showCaches(engine.stats);
  const workers = engine.workers ?? []; // operators alone are told
  byId("server-workers-card").hidden = workers.length === 0;
  const rows = workers.map((worker) => [`${worker.role} ${worker.index}`, ...WORKER.slice(1).map((name) => cell(worker[name]))]);
  byId("server-workers").replaceChildren(table("Workers", ["", ...WORKER.slice(1)], rows));
}

function cell(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" && value < 1000 ? count(value) : String(value); // process ids are names
}

function showFacts(engine, card) {
  const { stats, tokens, max_model_len: context } = engine;
  const rows = [
    ["version", engine.version],
    ["model", engine.model],
    ["context", context ? `${count(context)} tokens` : "–"],
    ["state", engine.state],
    ["up for", duration(engine.uptime_s)],
    ["engine restarts", count(engine.restarts)],
    ["open requests", count(engine.open_requests)],
    ["running, waiting", `${count(stats.running ?? 0)}, ${count(stats.waiting ?? 0)}`],
    ["preemptions", count(stats.preemptions ?? 0)],
    ["tokens in, out", `${count(tokens.prompt)}, ${count(tokens.answer)}`],
  ];
  const place = el("div", { className: "about" });
  if (card) showAbout(card, place);
  byId("server-facts").replaceChildren(table("Server", ["", ""], rows), place);
}

function showRequests({ requests }) {
  const sum = (kind) => Object.values(requests[kind]).reduce((total, number) => total + number, 0);
  const leads = [["answered", sum("answered")], ["failed", sum("failed")], ["refused", sum("refused")]];
  const isBad = (name, value) => name !== "answered" && value > 0;
  const numbers = leads.map(([name, value]) =>
    el("div", { className: isBad(name, value) ? "bad" : "" }, el("dt", {}, name), el("dd", {}, count(value))));
  const rows = Object.entries(requests).flatMap(([kind, reasons]) =>
    Object.entries(reasons).map(([reason, number]) => [reason, kind, count(number)]));
  const reasons = rows.length ? table("Requests by reason", ["why it ended", "", "requests"], rows) : "No request has ended yet.";
  byId("server-requests").replaceChildren(el("dl", { className: "numbers lead" }, ...numbers), reasons);
}

function showCaches({ prefix_cache: prefix, encoder_cache: encoder, kv, encoder: work, kv_offload: offload }) {
  const lookups = encoder.hits + encoder.misses;
  const rows = [
    ["prefix cache", rate(prefix.hits, prefix.queries), `${count(prefix.hits)} of ${count(prefix.queries)} tokens`],
    ["encoder cache", rate(encoder.hits, lookups), `${count(encoder.hits)} of ${count(lookups)} lookups`],
    ["KV blocks", rate(kv.used, kv.total), `${count(kv.used)} used, ${count(kv.idle)} cached of ${count(kv.total)}`],
    ["embeddings", rate(encoder.slots_used, encoder.slots_total), `${count(encoder.slots_used)} of ${count(encoder.slots_total)}`],
    ["evictions", "", `${count(prefix.evictions)} KV blocks, ${count(encoder.evictions)} pictures`],
    ["pictures", "", `${count(work.decoded)} decoded, ${count(work.encoded)} encoded, ${count(work.failed)} failed`],
  ];
  if (offload?.total) rows.push(["KV in host memory", rate(offload.used, offload.total), `${count(offload.hits)} hits`]);
  byId("server-caches").replaceChildren(
    table("Caches", ["", "hit or in use", ""], rows),
    el("p", { className: "quiet" }, "Since the engine's start. /metrics has these and more, for Prometheus."));
}

function rate(part, whole) {
  return whole ? percent(part / whole) : "–";
}

function duration(seconds) {
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${seconds} s`;
}
