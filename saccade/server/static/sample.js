// Samples of what the built-in model was trained on, each with questions to try. Those in small print or motion are files:
// training/page_samples.py drew them. The page draws the others.

const INK = "#0f0f0f";
const COLOURS = { red: "#dc1e23", green: "#1e9637", blue: "#234bd7", yellow: "#f5dc28", purple: "#7d28a5" };

const RECEIPT = {
  type: "object",
  properties: { shop: { type: "string" }, date: { type: "string" }, total: { type: "number" } },
  required: ["shop", "date", "total"],
  additionalProperties: false,
};

// A question is asked as it is, or under a schema that its answer fits.
const SAMPLES = [
  {
    name: "Shapes",
    files: [drawn("shapes.png", drawShapes)],
    questions: [["What colour is the square?"], ["How many circles are there?"], ["Describe the picture."]],
  },
  {
    name: "Receipt",
    files: [stored("receipt.png")],
    questions: [["Extract the data as JSON.", RECEIPT], ["What is the total?"], ["How much is Honey?"]],
  },
  {
    name: "Chart",
    files: [drawn("chart.png", drawChart)],
    questions: [["Which bar is the largest?"], ["What is the value of Lima?"], ["How many bars are there?"]],
  },
  {
    name: "Clip",
    files: [stored("clip.webm")],
    questions: [["What happens in the clip?"], ["Which way does the circle move?"], ["How many shapes are there?"]],
  },
  {
    name: "Pair",
    files: [drawn("before.png", drawBefore, 160, 128), drawn("after.png", drawAfter, 160, 128)],
    questions: [["What is different?"], ["Which picture has a yellow square?"], ["How many pictures are there?"]],
  },
  {
    name: "Landscape",
    files: [stored("landscape.jpg")],
    questions: [["What is this?"], ["How many shapes are there?"]],
  },
];

export const SAMPLE_NAMES = SAMPLES.map(({ name }) => name);

// The files of a sample, which bring their questions. The same every time, so caches can hit.
export async function sampleFiles(index, api) {
  const { files, questions } = SAMPLES[index % SAMPLES.length];
  const asked = questions.map(([text, schema = null]) => ({ text, schema }));
  return Promise.all(files.map(async (make) => Object.assign(await make(api), { questions: asked })));
}

function drawn(name, draw, width = 320, height = 240) {
  return async () => {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#ffffff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    draw(pen);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    return new File([blob], name, { type: "image/png" });
  };
}

function stored(name) {
  return async (api) => {
    const blob = await api.blob(`static/${name}`);
    return new File([blob], name, { type: blob.type });
  };
}

// --- drawings ---

function drawShapes(pen) {
  disc(pen, 70, 70, 42, COLOURS.red);
  disc(pen, 232, 178, 36, COLOURS.purple);
  pen.fillStyle = COLOURS.blue;
  pen.fillRect(196, 36, 80, 80);
  pen.fillStyle = COLOURS.green;
  polygon(pen, [[88, 138], [138, 214], [38, 214]]);
}

function drawBefore(pen) {
  drawPair(pen, COLOURS.yellow);
}

function drawAfter(pen) {
  drawPair(pen, COLOURS.blue);
}

function drawPair(pen, colour) {
  disc(pen, 46, 46, 26, COLOURS.red);
  pen.fillStyle = colour;
  pen.fillRect(92, 62, 50, 50);
}

function drawChart(pen) {
  const { red, blue, green, purple } = COLOURS;
  const bars = [["Oslo", 18, red], ["Lima", 32, blue], ["Rome", 9, green], ["Kyiv", 25, purple]];
  const [left, floor, perUnit] = [40, 214, 4.8];
  pen.font = "15px DejaVu Sans, Verdana, sans-serif";
  drawAxes(pen, left, floor, perUnit);
  pen.textAlign = "center";
  bars.forEach(([label, value, colour], index) => {
    const x = left + 10 + index * 69;
    pen.fillStyle = colour;
    pen.fillRect(x, floor - value * perUnit, 46, value * perUnit);
    pen.fillStyle = INK;
    pen.fillText(label, x + 23, floor + 18);
    pen.fillText(value, x + 23, floor - value * perUnit - 5);
  });
}

function drawAxes(pen, left, floor, perUnit) {
  pen.fillStyle = INK;
  pen.fillRect(left, floor - 40 * perUnit, 1, 40 * perUnit);
  pen.fillRect(left, floor, 276, 1);
  pen.textAlign = "right";
  for (const value of [0, 10, 20, 30, 40]) {
    pen.fillRect(left - 4, floor - value * perUnit, 4, 1);
    pen.fillText(value, left - 7, floor - value * perUnit + 5);
  }
}

function disc(pen, x, y, radius, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

function polygon(pen, points) {
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.fill();
}
