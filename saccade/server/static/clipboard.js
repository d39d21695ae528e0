// A button that copies a text, and says for a moment what became of it.

import { el } from "./dom.js";

const SAID_MS = 1500;

export function copyButton(label, text) {
  const button = el("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), SAID_MS);
  });
  return button;
}

// Browsers have a clipboard only on secure pages; elsewhere a selection can still be copied.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedSelection(text);
  }
}

function copiedSelection(text) {
  const area = el("textarea", { value: text, className: "unseen", ariaHidden: "true" });
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  return isDone;
}
