// The ways pictures come in: dropped anywhere, pasted, or chosen from a list of files.

import { byId } from "./dom.js";

export function takeFiles(onFiles) {
  const input = byId("files");
  byId("pick").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    onFiles([...input.files]);
    input.value = ""; // so that the same file can be chosen again after it was removed
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return; // text goes where the cursor is
    event.preventDefault();
    onFiles(files);
  });
  watchDrops(document.querySelectorAll(".drop"), onFiles);
}

// The whole page takes drops: a picture that misses the box must not replace the page.
function watchDrops(boxes, onFiles) {
  const mark = (isOver) => boxes.forEach((box) => box.classList.toggle("over", isOver));
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) mark(false);
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    onFiles([...event.dataTransfer.files]);
  });
}
