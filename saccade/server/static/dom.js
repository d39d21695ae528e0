// Small ways to build and find elements, and to write numbers. Knows nothing of the page's content.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

// Text only ever becomes text: nothing here takes markup.
export function el(tag, { className, on, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  if (className) element.className = className;
  for (const [event, listener] of Object.entries(on ?? {})) element.addEventListener(event, listener);
  element.append(...children);
  return element;
}

export function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Parts of a bar: {name, value} each, out of `whole`.
export function rail(parts, whole, label) {
  const bar = el("div", { className: "rail", role: "img", ariaLabel: label });
  for (const { name, value } of parts) {
    const part = el("i", { className: value > 0 ? `${name} some` : name });
    part.style.width = whole > 0 ? `${(100 * value) / whole}%` : "0";
    bar.append(part);
  }
  return bar;
}

// The first cell of each row heads it.
export function table(label, heads, rows, className = "") {
  const head = heads.map((text) => el("th", { scope: "col" }, text));
  const body = rows.map(([first, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, first), ...cells.map((cell) => el("td", {}, cell))));
  return el("table", { className: `figure ${className}`, ariaLabel: label },
    el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

export function show(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

export function count(value) {
  return value.toLocaleString("en");
}

export function times(width, height) {
  return `${count(width)} × ${count(height)}`;
}

export function ms(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 9.95 || value < 0.05 ? Math.round(value) : value.toFixed(1)} ms`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}
