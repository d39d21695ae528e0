// What is asked of every answer: temperature, length, a system prompt, a JSON schema. Kept in this browser; empty is the model's own.

import { byId } from "./dom.js";
import { keep, kept } from "./keep.js";

const KEPT = "saccade-settings";
const NAMES = ["temperature", "max_tokens", "system", "schema"];
const USUAL_LENGTH = 512; // tokens of an answer; less where the context has less left

export class Settings {
  // `onChange`: what would be sent has changed.
  constructor(onChange) {
    this.onChange = onChange;
  }

  start() {
    const values = kept(KEPT, {});
    for (const name of NAMES) this.#field(name).value = values[name] ?? "";
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    byId("settings").addEventListener("input", () => this.#changed());
    byId("settings-reset").addEventListener("click", () => {
      byId("settings").reset();
      this.#changed();
    });
    byId("settings-open").addEventListener("click", () => this.#toggle());
    this.#count();
  }

  // What the served model does where a field is empty.
  onCard({ default_sampling_params: defaults, max_model_len: most }) {
    this.#field("temperature").placeholder = defaults.temperature ?? 1;
    Object.assign(this.#field("max_tokens"), { placeholder: Math.min(USUAL_LENGTH, most), max: most });
  }

  get system() {
    return this.#field("system").value.trim();
  }

  // An object, or null where there is none or what is written is none.
  get schema() {
    try {
      const value = JSON.parse(this.#field("schema").value);
      return typeof value === "object" && !Array.isArray(value) ? value : null;
    } catch {
      return null;
    }
  }

  // Whether what is written as a schema is none.
  get isSchemaWrong() {
    return Boolean(this.#field("schema").value.trim()) && !this.schema;
  }

  // The fields of a request; `room` is what the context has left, if that is known. An answer has at least a token.
  fields(room = Infinity) {
    const asked = this.#number("max_tokens") ?? USUAL_LENGTH;
    const temperature = this.#number("temperature");
    const length = { max_tokens: Math.max(1, Math.min(asked, room)) };
    return temperature === null ? length : { temperature, ...length };
  }

  // Of a field that is empty or out of its range, nothing is sent.
  #number(name) {
    const { value, validity } = this.#field(name);
    return value !== "" && validity.valid ? Number(value) : null;
  }

  #changed() {
    keep(KEPT, Object.fromEntries(NAMES.map((name) => [name, this.#field(name).value])));
    this.#count();
    this.onChange();
  }

  // So that nobody wonders about answers under a setting of last week.
  #count() {
    this.#field("schema").setCustomValidity(this.isSchemaWrong ? "This is no JSON object." : "");
    const set = NAMES.filter((name) => this.#field(name).value.trim()).length;
    byId("settings-open").textContent = set ? `Settings (${set})` : "Settings";
    for (const name of NAMES) this.#field(name).ariaInvalid = this.#field(name).validity.valid ? null : "true";
  }

  #toggle() {
    const panel = byId("settings");
    panel.hidden = !panel.hidden;
    byId("settings-open").ariaExpanded = String(!panel.hidden);
    if (!panel.hidden) this.#field("temperature").focus();
  }

  #field(name) {
    return byId("settings").elements[name];
  }
}
