// Frames of a video as PNG files, taken by the browser: for models that take no videos.

const LONGEST_SIDE = 1280; // frames of a large recording would be megabytes each
const PATIENCE_MS = 15_000;

export async function framesOf(file, number) {
  const url = URL.createObjectURL(file);
  const video = Object.assign(document.createElement("video"), { muted: true, preload: "auto", src: url });
  try {
    await event(video, "loadeddata");
    const seconds = await duration(video);
    const frames = [];
    for (let index = 0; index < number; index += 1) {
      frames.push(await frameAt(video, (seconds * (index + 0.5)) / number, `${file.name} ${index + 1}.png`));
    }
    return frames;
  } finally {
    video.removeAttribute("src");
    URL.revokeObjectURL(url);
  }
}

// Recordings made by a browser do not say how long they are until somebody has looked for the end.
async function duration(video) {
  if (!Number.isFinite(video.duration)) {
    const known = event(video, "durationchange");
    video.currentTime = Number.MAX_SAFE_INTEGER;
    await known;
  }
  return video.duration;
}

async function frameAt(video, seconds, name) {
  const there = event(video, "seeked");
  video.currentTime = seconds;
  await there;
  const scale = Math.min(1, LONGEST_SIDE / Math.max(video.videoWidth, video.videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(video.videoWidth * scale);
  canvas.height = Math.round(video.videoHeight * scale);
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], name, { type: "image/png" });
}

function event(video, name) {
  return new Promise((resolve, reject) => {
    video.addEventListener(name, resolve, { once: true });
    video.addEventListener("error", () => reject(new Error("it cannot be played")), { once: true });
    setTimeout(() => reject(new Error("it took too long")), PATIENCE_MS);
  });
}
