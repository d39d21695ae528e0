// Shows the pictures: small ones to choose from, and a large one as the model sees it, its tokens drawn over it.

import { byId, count, el, plural, svg, times } from "./dom.js";

// `items` has the bill's line of each picture, by id.
export function showThumbs(pictures, items) {
  const isEmpty = pictures.list.length === 0;
  byId("drop").classList.toggle("small", !isEmpty);
  byId("sample").classList.toggle("primary", isEmpty);
  byId("thumbs").replaceChildren(...pictures.list.map((picture) => thumb(pictures, picture, items.get(picture.id))));
}

function thumb(pictures, picture, item) {
  const isShown = picture === pictures.shown;
  const inside = insideOf(picture);
  const choose = el("button", {
    type: "button",
    className: "thumb",
    ariaPressed: String(isShown),
    ariaLabel: `Show ${picture.name}`,
    on: { click: () => pictures.select(picture.id) },
  }, inside);
  const remove = el("button", {
    type: "button",
    className: "remove",
    ariaLabel: `Remove ${picture.name}`,
    on: { click: () => pictures.remove(picture.id) },
  }, "✕");
  const note = picture.problem ? "refused" : item ? plural(item.tokens, "token") : " ";
  const how = { className: picture.problem ? "bad" : "", title: picture.name };
  return el("li", how, choose, remove, el("small", {}, note));
}

function insideOf({ bitmap, clip, url }) {
  if (clip) return el("video", { src: clip, muted: true, preload: "metadata" });
  return bitmap ? el("img", { src: url, alt: "" }) : "?";
}

export function showLarge(picture, item) {
  const canDraw = Boolean(picture?.bitmap && item);
  byId("view").hidden = !canDraw && !picture?.clip;
  byId("seen").parentElement.hidden = !canDraw;
  showClip(picture);
  if (byId("view").hidden) return;
  Object.assign(byId("save"), { href: picture.clip ?? picture.url, download: picture.name });
  byId("caption").textContent = picture.clip ? clipCaption(item) : drawn(picture, item);
}

// Set only when it changes: a video would begin again at every bill.
function showClip(picture) {
  const clip = byId("clip");
  const src = picture?.clip ?? "";
  clip.hidden = !src;
  if (clip.getAttribute("src") === src) return;
  clip.setAttribute("src", src);
  clip.ariaLabel = src ? picture.name : "";
}

function clipCaption(item) {
  if (!item) return "";
  const size = times(item.resized_width, item.resized_height);
  return `What the model sees: ${plural(item.frames, "frame")} of ${size} = ${plural(item.tokens, "token")}`;
}

function drawn(picture, item) {
  const [width, height] = [item.resized_width, item.resized_height];
  const canvas = byId("seen");
  canvas.width = width;
  canvas.height = height;
  canvas.ariaLabel = `${picture.name} as the model sees it, ${times(width, height)} pixels`;
  canvas.parentElement.style.width = `min(100%, calc(var(--view-height) * ${width / height}))`;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(picture.bitmap, 0, 0, width, height);
  const cells = tokenGrid(item);
  drawGrid(byId("grid"), cells, item);
  return captionOf(item, cells);
}

// A token stands for a square of patches; models that crop see less than the resized picture.
function tokenGrid({ grid: [, rows, columns], tokens, resized_width: width, resized_height: height }) {
  const merge = Math.max(1, Math.round(Math.sqrt((rows * columns) / tokens)));
  const side = Math.min(width / columns, height / rows); // of a patch, in resized pixels
  return { rows: rows / merge, columns: columns / merge, merge, side };
}

function drawGrid(overlay, { rows, columns, merge, side }, { resized_width: width, resized_height: height }) {
  const [across, down] = [(columns * merge * side) / width, (rows * merge * side) / height];
  Object.assign(overlay.style, {
    left: `${50 * (1 - across)}%`,
    top: `${50 * (1 - down)}%`,
    width: `${100 * across}%`,
    height: `${100 * down}%`,
  });
  overlay.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
  const patches = svg("path", { class: "patches", d: lines(columns, rows, 1 / merge) });
  overlay.replaceChildren(patches, svg("path", { class: "tokens", d: lines(columns, rows, 1) }));
}

function lines(columns, rows, step) {
  const path = [];
  for (let x = 0; x <= columns; x += step) path.push(`M${x} 0V${rows}`);
  for (let y = 0; y <= rows; y += step) path.push(`M0 ${y}H${columns}`);
  return path.join("");
}

function captionOf(item, { rows, columns, merge }) {
  const cell = merge > 1 ? `each ${merge} × ${merge} patches` : "each a patch";
  return `What the model sees: ${times(columns, rows)} = ${count(item.tokens)} tokens, ${cell}`;
}
