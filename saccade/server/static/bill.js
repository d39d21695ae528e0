// The bill of what would be sent: asked for a moment after the last change, and shown as a table and a bar.

import { byId, count, el, plural, rail, times } from "./dom.js";

const PAUSE_MS = 200;
const CHARS_PER_MS = 10_000; // a larger body waits longer: each bill sends it whole
const LONGEST_PAUSE_MS = 2000;

export class BillWatch {
  #timer = 0;
  #asking = new AbortController();
  latest = null;

  // `body` gives the request as it would be sent, or null when there is nothing to price; `chars` about its length.
  constructor(api, body, { chars, onBill, onProblem }) {
    Object.assign(this, { api, body, chars, onBill, onProblem });
  }

  touch() {
    clearTimeout(this.#timer);
    this.#asking.abort();
    byId("bill").classList.add("old");
    const pause = Math.min(LONGEST_PAUSE_MS, PAUSE_MS + this.chars() / CHARS_PER_MS);
    this.#timer = setTimeout(() => this.#ask(), pause);
  }

  async #ask() {
    this.#asking = new AbortController();
    const body = this.body();
    try {
      this.latest = body && (await this.api.post("v1/bill", body, this.#asking.signal));
      this.onBill(this.latest);
    } catch (error) {
      if (error.name !== "AbortError") this.onProblem(error);
    }
  }
}

export function showBill(bill, names) {
  const place = byId("bill");
  place.classList.remove("old");
  place.replaceChildren();
  if (!bill) return;
  if (bill.items.length) {
    place.append(table(bill, names));
  }
  place.append(share(bill));
}

function table(bill, names) {
  const head = row("th", ["picture", "size", "resized", "grid", "tokens", "KV blocks"]);
  const rows = bill.items.map((item, index) => row("td", cells(item, names[index])));
  return el("table", { ariaLabel: "Cost of each picture" }, el("thead", {}, head), el("tbody", {}, ...rows));
}

function cells(item, name) {
  const [, rows, columns] = item.grid;
  const grid = item.kind === "video" ? `${times(columns, rows)} × ${item.grid[0]}` : times(columns, rows);
  const sizes = [times(item.width, item.height), times(item.resized_width, item.resized_height), grid];
  return [name, ...sizes, count(item.tokens), count(item.kv_blocks)];
}

function row(tag, values) {
  const cell = (value, i) => el(tag, { className: i === 3 ? "wide" : "", title: i ? "" : value }, value);
  return el("tr", {}, ...values.map(cell));
}

function share(bill) {
  const pictures = bill.image_tokens + bill.video_tokens;
  const { prompt_tokens: tokens, max_model_len: context } = bill;
  const part = ((100 * tokens) / context).toFixed(context > 20 * tokens ? 1 : 0);
  const videos = bill.video_tokens ? `${count(bill.video_tokens)} video + ` : "";
  const images = bill.image_tokens || !videos ? `${count(bill.image_tokens)} picture + ` : "";
  const kinds = `${images}${videos}${count(bill.text_tokens)} text`;
  const kept = bill.encoder_cache_bytes; // of pictures that answers look at
  const beside = kept ? `, ${(kept / 1e6).toFixed(1)} MB of the encoder cache` : "";
  const sum = `${plural(tokens, "token")} = ${kinds}, ${plural(bill.kv_blocks, "KV block")}${beside}`;
  const label = `${part} % of the context${bill.fits ? "" : ": too long"}`;
  const parts = [{ name: "picture", value: pictures }, { name: "text", value: bill.text_tokens }];
  const words = el("p", {}, el("span", { id: "bill-total" }, sum), el("span", {}, label));
  const bar = rail(parts, Math.max(context, tokens), label);
  return el("div", { className: bill.fits ? "share" : "share over" }, words, bar);
}
