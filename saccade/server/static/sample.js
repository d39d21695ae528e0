// Pictures the page draws itself, of the kinds the built-in model was trained on, each with questions to try.

const INK = "#0f0f0f";
const COLOURS = { red: "#dc1e23", green: "#1e9637", blue: "#234bd7", yellow: "#f5dc28", purple: "#7d28a5" };

const SAMPLES = [
  {
    name: "shapes.png",
    draw: drawShapes,
    questions: ["What colour is the square?", "How many circles are there?", "Describe the picture."],
  },
  {
    name: "word.png",
    draw: drawWord,
    questions: ["What word is written here?", "What colour is the text?", "Describe the picture."],
  },
  {
    name: "chart.png",
    draw: drawChart,
    questions: ["Which bar is the largest?", "What is the value of Lima?", "How many bars are there?"],
  },
];

// The next sample as a PNG file that brings its questions. The same picture every time it comes round, so caches can hit.
export async function sampleFile(index) {
  const { name, draw, questions } = SAMPLES[index % SAMPLES.length];
  const canvas = Object.assign(document.createElement("canvas"), { width: 320, height: 240 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  draw(pen);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return Object.assign(new File([blob], name, { type: "image/png" }), { questions });
}

function drawShapes(pen) {
  disc(pen, 70, 70, 42, COLOURS.red);
  disc(pen, 232, 178, 36, COLOURS.purple);
  pen.fillStyle = COLOURS.blue;
  pen.fillRect(196, 36, 80, 80);
  pen.fillStyle = COLOURS.green;
  polygon(pen, [[88, 138], [138, 214], [38, 214]]);
}

function drawWord(pen) {
  pen.fillStyle = COLOURS.green;
  pen.font = "48px DejaVu Sans, Verdana, sans-serif";
  pen.textAlign = "center";
  pen.fillText("RIVER", 160, 136);
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
