// A request as a program that sends it again: for a shell with curl, and for Python with OpenAI's client.

const KEY = "SACCADE_API_KEY"; // the environment variable that programs read: the key itself is never written
const OWN_FIELDS = ["mm_processor_kwargs"]; // which OpenAI's client knows only as extra_body

// `files` has the name of each file by its data URL; `base` is the address that ends in "/v1".
export function asCurl({ body, files, base, hasKey }) {
  const text = (value) => (files.has(value) ? shellDataUrl(value, files.get(value)) : escaped(JSON.stringify(value)));
  const words = { text, step: "  ", true: "true", false: "false", null: "null" };
  const key = hasKey ? [`  -H "Authorization: Bearer $${KEY}" \\`] : [];
  return [
    `curl ${quoted(`${base}/chat/completions`)} \\`,
    "  -H 'Content-Type: application/json' \\",
    ...key,
    "  --data-binary @- <<EOF",
    written(body, words),
    "EOF",
    "",
  ].join("\n");
}

export function asPython({ body, files, base, hasKey }) {
  const text = (value) => (files.has(value) ? pythonDataUrl(value, files.get(value)) : JSON.stringify(value));
  const words = { text, step: "    ", true: "True", false: "False", null: "None" };
  const own = Object.fromEntries(OWN_FIELDS.filter((name) => name in body).map((name) => [name, body[name]]));
  const known = Object.fromEntries(Object.entries(body).filter(([name]) => !(name in own)));
  const given = Object.keys(own).length ? { ...known, extra_body: own } : known;
  const hasFiles = JSON.stringify(body).includes(";base64,");
  return [
    ...(hasFiles ? ["import base64"] : []),
    ...(hasKey ? ["import os"] : []),
    ...(hasFiles || hasKey ? [""] : []),
    "from openai import OpenAI",
    "",
    ...(hasFiles ? DATA_URL : []),
    `client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${hasKey ? `os.environ["${KEY}"]` : '"EMPTY"'})`,
    "answer = client.chat.completions.create(",
    ...Object.entries(given).map(([name, value]) => `    ${name}=${written(value, words, "    ")},`),
    ")",
    "print(answer.choices[0].message.content)",
    "",
  ].join("\n");
}

const DATA_URL = [
  "",
  "def data_url(path, kind):",
  '    with open(path, "rb") as file:',
  '        return f"data:{kind};base64," + base64.b64encode(file.read()).decode()',
  "",
  "",
];

// A value in the words of a language: JSON and Python differ in their constants alone.
function written(value, words, indent = "") {
  if (typeof value === "string") return words.text(value);
  if (value === null || typeof value === "boolean") return words[value];
  if (typeof value === "number") return String(value);
  const inner = indent + words.step;
  const parts = Array.isArray(value)
    ? value.map((part) => written(part, words, inner))
    : Object.entries(value).map(([name, part]) => `${words.text(name)}: ${written(part, words, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return parts.length ? `${open}\n${inner}${parts.join(`,\n${inner}`)}\n${indent}${close}` : open + close;
}

function kindOf(url) {
  return url.slice("data:".length, url.indexOf(";"));
}

// Read in the text that the shell hands to curl: an argument may not be as long as a picture.
function shellDataUrl(url, name) {
  return `"data:${escaped(kindOf(url))};base64,$(base64 < ${quoted(name)} | tr -d '\\n')"`;
}

function pythonDataUrl(url, name) {
  return `data_url(${JSON.stringify(name)}, ${JSON.stringify(kindOf(url))})`;
}

// Without line breaks: a name with one could end the text early.
function quoted(text) {
  return `'${text.replace(/\p{Cc}/gu, "_").replaceAll("'", `'\\''`)}'`;
}

// What a shell would read in the text between the EOFs.
function escaped(text) {
  return text.replace(/[\\$`]/g, "\\$&");
}
