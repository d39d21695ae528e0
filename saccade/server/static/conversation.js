// The conversation as the server gets it: turns with their pictures become messages. Shows nothing, sends nothing.

export class Conversation {
  id = newId(); // of its place in the history
  // {question, pictures: [id], media, previews, answer, ids}; ids: where each picture stood when it was asked
  turns = [];

  clear() {
    this.turns = [];
    this.id = newId();
  }

  // The turn that a question would add. Pictures go with the first question asked while they are there.
  next(question, pictures) {
    const sent = new Set(this.turns.flatMap((turn) => turn.pictures));
    const fresh = pictures.map((picture) => picture.id).filter((id) => !sent.has(id));
    return { question, pictures: fresh, answer: null };
  }

  // Messages of all turns and this one, if it holds anything; and the id of each picture part, which errors name.
  messages(turn, pictures, { detail, system }) {
    const byId = new Map(pictures.map((picture) => [picture.id, picture]));
    const ids = new Map();
    const messages = system ? [{ role: "system", content: system }] : [];
    const isNew = turn.question || turn.pictures.length;
    for (const { question, pictures: shown, answer } of isNew ? [...this.turns, turn] : this.turns) {
      const kept = shown.filter((id) => byId.has(id));
      kept.forEach((id, part) => ids.set(`messages[${messages.length}].content[${part}]`, id));
      const parts = kept.map((id) => partOf(byId.get(id), detail));
      if (question) parts.push({ type: "text", text: question });
      messages.push({ role: "user", content: parts });
      if (answer !== null) messages.push({ role: "assistant", content: answer });
    }
    return { messages, ids };
  }
}

// Pages that are not secure have no crypto.randomUUID.
function newId() {
  return `${Date.now()}-${Math.random()}`;
}

function partOf({ kind, url }, detail) {
  if (kind === "video") return { type: "video_url", video_url: { url } };
  return { type: "image_url", image_url: { url, detail } };
}

// The id of the picture that an error's `param` names, or null.
export function pictureAt(param, ids) {
  const place = /^messages\[\d+\]\.content\[\d+\]/.exec(param ?? "");
  return place ? (ids.get(place[0]) ?? null) : null;
}
