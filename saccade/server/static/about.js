// What the served model takes, can and cannot do, as far as the server tells. Asks for nothing.

import { count, el, plural } from "./dom.js";

const UPLOAD_QUESTIONS = ["Describe this picture.", "What text is in it?", "What stands out?"];
const VIDEO_QUESTIONS = ["What happens in this video?", "Describe the first and the last frame."];

export function showAbout({ id, about, multimodal }, place) {
  const told = about
    ? [line(`${id} is ${about.what}.`), line(about.can, "It can"), line(about.cannot, "It cannot")]
    : [];
  place.replaceChildren(...told, el("p", { className: "quiet" }, takes(multimodal)));
}

function line(text, start = "") {
  return el("p", {}, ...(start ? [el("b", {}, start), ` ${text}.`] : [text]));
}

function takes({ limit_per_prompt: limits, formats, max_image_bytes: bytes, video }) {
  if (!limits.image && !limits.video) return "It takes text alone.";
  const pictures = `${plural(limits.image, "picture")} a prompt (${formats.join(", ")}, ${megabytes(bytes)} each)`;
  const canVideo = limits.video && video?.formats.length;
  const videos = canVideo ? `, and ${plural(limits.video, "video")} (${video.formats.join(", ")})` : "";
  return `It takes up to ${pictures}${videos}.`;
}

export function megabytes(bytes) {
  return `${count(Math.floor(bytes / 2 ** 20))} MiB`;
}

// Questions that fit the picture shown, {text, schema}: a sample brings its own; for uploads only where the model may know them.
export function questionsFor(picture, card) {
  if (!picture || picture.problem) return [];
  if (picture.questions) return picture.questions;
  if (!card || card.about) return [];
  return (picture.kind === "video" ? VIDEO_QUESTIONS : UPLOAD_QUESTIONS).map((text) => ({ text, schema: null }));
}

// A warning where a model of known limits gets what it may not know.
export function hintFor(pictures, card) {
  if (!card?.about || pictures.every((picture) => picture.questions)) return "";
  return `${card.id} knows drawings like the samples. About photographs it can only say that it cannot read them.`;
}
