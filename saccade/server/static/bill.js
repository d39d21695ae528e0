// The bill of what would be sent: asked for a moment after the last change, and shown as a table and a bar.

import { byId, count, el, plural, rail, times } from "./dom.js";

const PAUSE_MS = 200;

export class BillWatch {
  #timer = 0;
  #asking = new AbortController();
  latest = null;

  // `body` gives the request as it would be sent, or null when there is nothing to price.
  constructor(api, body, { onBill, onProblem }) {
    Object.assign(this, { api, body, onBill, onProblem });
  }

  touch() {
    clearTimeout(this.#timer);
    this.#asking.abort();
    byId("bill").classList.add("old");
    this.#timer = setTimeout(() => this.#ask(), PAUSE_MS);
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
    const box = { className: "scroll", tabIndex: 0, role: "group", ariaLabel: "Cost of each picture" };
    place.append(el("div", box, table(bill, names)));
  }
  place.append(share(bill));
}

function table(bill, names) {
  const head = row("th", ["picture", "size", "resized", "grid", "tokens", "KV blocks"]);
  const rows = bill.items.map((item, index) => row("td", cells(item, names[index])));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}

function cells(item, name) {
  const [, rows, columns] = item.grid;
  const sizes = [times(item.width, item.height), times(item.resized_width, item.resized_height), times(columns, rows)];
  return [name, ...sizes, count(item.tokens), count(item.kv_blocks)];
}

function row(tag, values) {
  const wide = [0, 3]; // columns that narrow screens do without
  const cell = (value, i) => el(tag, { className: wide.includes(i) ? "wide" : "", title: i ? "" : value }, value);
  return el("tr", {}, ...values.map(cell));
}

function share(bill) {
  const pictures = bill.image_tokens + bill.video_tokens;
  const { prompt_tokens: tokens, max_model_len: context } = bill;
  const part = ((100 * tokens) / context).toFixed(context > 20 * tokens ? 1 : 0);
  const kinds = `${count(pictures)} picture + ${count(bill.text_tokens)} text`;
  const kept = bill.encoder_cache_bytes; // of pictures that answers look at
  const beside = kept ? `, ${(kept / 1e6).toFixed(1)} MB of the encoder cache` : "";
  const sum = `${plural(tokens, "token")} = ${kinds}, ${plural(bill.kv_blocks, "KV block")}${beside}`;
  const label = `${part} % of the context${bill.fits ? "" : ": too long"}`;
  const parts = [{ name: "picture", value: pictures }, { name: "text", value: bill.text_tokens }];
  const words = el("p", {}, el("span", { id: "bill-total" }, sum), el("span", {}, label));
  const bar = rail(parts, Math.max(context, tokens), label);
  return el("div", { className: bill.fits ? "share" : "share over" }, words, bar);
}
