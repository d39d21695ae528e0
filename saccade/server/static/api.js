// Talks to the server: JSON both ways, answers as streams, errors as sentences. Keeps the key; knows no elements.

const KEY = "saccade-key";
const LOST = "The server does not answer. Nothing is lost here; try again in a moment.";

export class Problem extends Error {
  constructor(message, { status = 0, param = null, code = null } = {}) {
    super(message);
    this.status = status; // 0: no answer at all
    this.param = param; // the part of the request at fault
    this.code = code;
  }
}

export class Api {
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    sessionStorage.setItem(KEY, value);
  }

  async get(path) {
    return (await this.#send(path, {})).json();
  }

  async blob(path) {
    return (await this.#send(path, {})).blob();
  }

  async post(path, body, signal) {
    return (await this.#send(path, { body, signal })).json();
  }

  // The events of a streamed answer, parsed.
  async *stream(path, body, signal) {
    const response = await this.#send(path, { body: { ...body, stream: true }, signal });
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw problemOf(event, 200);
      yield event;
    }
    throw new Problem("The answer broke off; the server may have been stopped. Ask again.");
  }

  async #send(path, { body, signal }) {
    const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
    const options = { headers, signal };
    if (body) {
      options.method = "POST";
      options.body = JSON.stringify(body);
      headers["content-type"] = "application/json";
    }
    const response = await reach(path, options);
    if (!response.ok) throw problemOf(await response.json().catch(() => ({})), response.status);
    return response;
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(LOST);
  }
}

function problemOf(body, status) {
  const { message, param, code } = body.error ?? {};
  return new Problem(sentence(message ?? `the server answered with status ${status}`), { status, param, code });
}

// The server's messages are clauses for logs and libraries; people get a sentence.
function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice("data: ".length); // comments keep the connection alive
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(LOST);
  }
}
