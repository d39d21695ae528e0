"""Scenes of data: bar charts with labelled axes, and tables."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from saccade.apps.evaluation.scoring import OTHER_NUMBER
from training.canvas import Canvas
from training.chart_questions import ask_bars, ways_to_a_cell
from training.extract import ask_json
from training.fonts import Font, font, font_names
from training.palette import COLORS, NAMES, Rgb, background, distance, ink, shade
from training.records import Record, number_field, text_field
from training.samples import Picture, Question
from training.shape_questions import DESCRIBE
from training.sheet import Sheet, listed, others
from training.table_questions import ORDINALS, ask_places
from training.words import COLUMNS, headings, labels

LETTER_SIZES = (13, 18)  # of labels, pixels
_STEPS = (1, 2, 2, 3, 4, 5, 5, 10, 10, 20, 25, 50)


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: int
    color: str


class BarScene:
    skills: tuple[str, ...] = ("chart", "chart", "chart", "caption", "extract")

    def __init__(self, rng: Random, sheet: Sheet) -> None:
        self._face = font(rng.choice(font_names()), rng.randint(*LETTER_SIZES))
        count = min(rng.randint(2, 6), (sheet.drawn[0] - 34) // 26)
        step, self._ticks = rng.choice(_STEPS), rng.randint(3, 5)
        self._step = step
        one_color = rng.choice(NAMES) if rng.random() < 0.4 else None
        self._slot = (sheet.drawn[0] - 36) / count
        names = labels(rng, count, _longest(self._face, self._slot))
        self._is_labelled = rng.random() < 0.6 and self._slot > self._face.getlength("100")
        top = self._ticks * step
        values = [rng.randint(1, top) if self._is_labelled else step * rng.randint(1, self._ticks) for _ in names]
        colors = [one_color or rng.choice(NAMES) for _ in names]
        self.bars = [Bar(*parts) for parts in zip(names, values, colors, strict=True)]
        self.pictures: tuple[Picture, ...] = (self._drawn(rng, sheet),)

    def _drawn(self, rng: Random, sheet: Sheet) -> Picture:
        shades = {bar.color: shade(rng, bar.color) for bar in self.bars}
        paper, _ = background(rng, list(shades.values()))
        color = _readable(paper)
        canvas = Canvas(sheet.size, sheet.drawn, paper)
        line = sum(self._face.getmetrics())
        left, floor, ceiling = 34, canvas.height - line - 4, line + 2
        self._axis(canvas, color, left, floor, ceiling)
        for index, bar in enumerate(self.bars):
            middle = left + self._slot * (index + 0.5)
            half = self._slot * 0.34
            height = (floor - ceiling) * bar.value / (self._step * self._ticks)
            box = (int(middle - half), int(floor - height), int(middle + half), floor - 1)
            canvas.bar(box, shades[bar.color], NAMES.index(bar.color) + 1, below=bar.label)
            _centred(canvas, bar.label, middle, floor + 2, self._face, color)
            if self._is_labelled:
                _centred(canvas, str(bar.value), middle, box[1] - line, self._face, color, below=bar.label)
        return canvas.finish(rng)

    def _axis(self, canvas: Canvas, color: Rgb, left: int, floor: int, ceiling: int) -> None:
        canvas.draw.line((left, ceiling, left, floor, canvas.width - 2, floor), fill=color)
        rise = (floor - ceiling) / self._ticks
        middle = sum(self._face.getmetrics()) / 2
        stride = 1 if rise > 2 * middle else 2
        for tick in range(0, self._ticks + 1, stride):
            y = int(floor - rise * tick)
            canvas.draw.line((left - 3, y, left, y), fill=color)
            text = str(tick * self._step)
            canvas.text((left - 5 - int(self._face.getlength(text)), int(y - middle)), text, self._face, color)

    def ask(self, rng: Random, skill: str) -> Question | None:
        if skill == "caption":
            answer = f"The picture shows a bar chart with the bars {listed([b.label for b in self.bars])}."
            return Question("caption", rng.choice(DESCRIBE), answer, ("bar chart", *(b.label for b in self.bars)))
        if skill == "extract":
            return ask_json(rng, self.record())
        kind = rng.random()
        if kind < 0.35:
            return self._extreme(rng)
        if kind < 0.73:
            return self._value(rng)
        return self._other(rng) if kind < 0.88 else ask_bars(rng, self)

    def record(self) -> Record:
        rows = tuple(
            (
                text_field(("label", "name", "bar"), bar.label),
                number_field(("value", "height"), str(bar.value)),
                text_field(("color", "colour"), bar.color),
            )
            for bar in self.bars
        )
        return Record("chart", rows=rows, rows_names=("bars", "data", "values"))

    def is_clear(self, one: Bar, two: Bar) -> bool:
        """Whether one sees which of two bars is higher."""
        return abs(one.value - two.value) * 20 >= self._step * self._ticks

    def _extreme(self, rng: Random) -> Question | None:
        ordered = sorted(self.bars, key=lambda b: b.value)
        is_largest = rng.random() < 0.5
        bar, second = (ordered[-1], ordered[-2]) if is_largest else (ordered[0], ordered[1])
        if not self.is_clear(bar, second):
            return None
        word = rng.choice(("largest", "highest", "tallest") if is_largest else ("smallest", "lowest", "shortest"))
        text = rng.choice(
            (
                f"Which bar is the {word}?",
                f"What is the {word} bar?",
                f"Which label has the {word} bar?",
                f"Name the {word} bar.",
                f"Which is the {word}?",
                f"Which one is {word}?",
                f"Which one is the {word}?",
            )
        )
        return self._named(text, f"The {word} bar is {bar.label}.", bar)

    def _value(self, rng: Random) -> Question:
        bar = rng.choice(self.bars)
        text = rng.choice(
            (
                f"What is the value of {bar.label}?",
                f"What value does {bar.label} have?",
                f"What is the value of the bar {bar.label}?",
                f"How high is the bar {bar.label}?",
                f"Read the value of {bar.label}.",
            )
        )
        return Question("chart", text, f"The value of {bar.label} is {bar.value}.", (str(bar.value),), (OTHER_NUMBER,))

    def _other(self, rng: Random) -> Question | None:
        bar, kind = rng.choice(self.bars), rng.random()
        if kind < 0.4:
            text = rng.choice(("How many bars are there?", "How many bars does the chart have?", "Count the bars."))
            count = str(len(self.bars))
            return Question("chart", text, f"There are {count} bars.", (count,), (OTHER_NUMBER,))
        if kind < 0.7:
            text = rng.choice((f"What color is the bar {bar.label}?", f"Which color does {bar.label} have?"))
            return Question(
                "chart", text, f"The bar {bar.label} is {bar.color}.", (bar.color,), others(NAMES, bar.color)
            )
        if sum(b.value == bar.value for b in self.bars) > 1:
            return None
        return self._named(f"Which bar has the value {bar.value}?", f"The bar {bar.label} has that value.", bar)

    def _named(self, text: str, answer: str, bar: Bar) -> Question:
        return Question("chart", text, answer, (bar.label,), tuple(b.label for b in self.bars if b is not bar))


class TableScene:
    skills: tuple[str, ...] = ("table", "table", "table", "caption", "extract")

    def __init__(self, rng: Random, sheet: Sheet, *, is_varied: bool = False) -> None:
        """A varied table has any headings, and questions about the places of rows and columns."""
        self._is_varied = is_varied
        face = font(rng.choice(font_names()), rng.randint(*LETTER_SIZES))
        line = sum(face.getmetrics()) + 4
        rows = max(1, min(rng.randint(2, 5), sheet.drawn[1] // line - 1))
        fitting = int(sheet.drawn[0] / face.getlength("Weight")) - 1
        columns = max(1, min(rng.choice((1, 2, 2, 3, 3, 4)) if is_varied else rng.randint(1, 3), fitting))
        self.columns = headings(rng, columns) if is_varied else rng.sample(COLUMNS, columns)
        self.rows = labels(rng, rows, _longest(face, sheet.drawn[0] / (columns + 1)))
        most = rng.choice((10, 100, 1000))
        self.cells = [[rng.randrange(most) for _ in self.columns] for _ in self.rows]
        self.pictures: tuple[Picture, ...] = (self._drawn(rng, sheet, face, line),)

    def _drawn(self, rng: Random, sheet: Sheet, face: Font, line: int) -> Picture:
        paper, _ = background(rng, [])
        color, _ = ink(rng, paper)
        canvas = Canvas(sheet.size, sheet.drawn, paper)
        high = rng.randint(line, max(line, min(int(line * 1.8), canvas.height // (len(self.rows) + 1))))
        wide = (canvas.width - 4) / (len(self.columns) + 1)
        top = rng.randint(0, max(0, canvas.height - high * (len(self.rows) + 1) - 2))
        grid = [
            ["", *self.columns],
            *([row, *map(str, cells)] for row, cells in zip(self.rows, self.cells, strict=True)),
        ]
        for y, texts in enumerate(grid):
            for x, text in enumerate(texts):
                middle, above = 2 + wide * (x + 0.5), top + high * y + (high - line) // 2 + 2
                labels = (grid[0][x], grid[y][0]) if x and y else ("", "")
                if text:
                    _centred(canvas, text, middle, above, face, color, *labels)
        if rng.random() < 0.7:
            self._rules(canvas, color, top, high, wide)
        return canvas.finish(rng)

    def _rules(self, canvas: Canvas, color: Rgb, top: int, high: int, wide: float) -> None:
        bottom, right = top + high * (len(self.rows) + 1), int(2 + wide * (len(self.columns) + 1))
        for y in range(top, bottom + 1, high):
            canvas.draw.line((2, y, right, y), fill=color)
        for x in range(len(self.columns) + 2):
            canvas.draw.line((int(2 + wide * x), top, int(2 + wide * x), bottom), fill=color)

    def ask(self, rng: Random, skill: str) -> Question | None:
        if skill == "caption":
            answer = f"The picture shows a table with the columns {listed(self.columns)}."
            if len(self.columns) == 1:
                answer = f"The picture shows a table with the column {self.columns[0]}."
            return Question("caption", rng.choice(DESCRIBE), answer, ("table", *self.columns))
        if skill == "extract":
            return ask_json(rng, self.record())
        if self._is_varied and rng.random() < 0.35:
            return ask_places(rng, self)
        x, y = rng.randrange(len(self.columns)), rng.randrange(len(self.rows))
        row, column = self.rows[y], self.columns[x]
        if len(self.rows) > 1 and rng.random() < 0.2:
            return self._extreme(rng, x)
        text = rng.choice(
            (
                f"What is the {column} of {row}?",
                f"What is the value in row {row}, column {column}?",
                f"What is the {column.lower()} of {row}?",
                f"Which value is in the column {column} and the row {row}?",
                f"Read the {column} of {row}.",
            )
        )
        if rng.random() < 0.15:
            text = rng.choice(ways_to_a_cell(row, column, self.columns))
        value = str(self.cells[y][x])
        answer = self._placed(x, f"the {column} of {row} is {value}.")
        return Question("table", text, answer, (value,), (OTHER_NUMBER,))

    def _placed(self, x: int, answer: str) -> str:
        """Says where the column is, among several: to find it and to read a cell are two steps for six layers."""
        if len(self.columns) == 1:
            return answer[0].upper() + answer[1:]
        return f"In the {ORDINALS[x]} column, {answer}"

    def record(self) -> Record:
        rows = tuple(
            (
                text_field(("name", "row", "label"), row),
                *(
                    number_field((column.lower(), column), str(cell))
                    for column, cell in zip(self.columns, cells, strict=True)
                ),
            )
            for row, cells in zip(self.rows, self.cells, strict=True)
        )
        return Record("table", rows=rows, rows_names=("rows", "table", "data"))

    def _extreme(self, rng: Random, x: int) -> Question | None:
        values = [cells[x] for cells in self.cells]
        is_largest = rng.random() < 0.5
        best = max(values) if is_largest else min(values)
        if values.count(best) > 1:
            return None
        row = self.rows[values.index(best)]
        word = rng.choice(("largest", "largest", "highest") if is_largest else ("smallest", "smallest", "lowest"))
        text = rng.choice(("Which row has", "Which row has", "Which one has", "What has"))
        text = f"{text} the {word} {rng.choice((self.columns[x], self.columns[x].lower()))}?"
        answer = self._placed(x, f"{row} has the {word} {self.columns[x]}.")
        return Question("table", text, answer, (row,), tuple(r for r in self.rows if r != row))


def _longest(face: Font, width: float) -> int:
    return int(width / (face.getlength("nm") / 2))


def _centred(
    canvas: Canvas, text: str, middle: float, top: float, face: Font, color: Rgb, below: str = "", beside: str = ""
) -> None:
    at = int(middle - face.getlength(text) / 2), int(top)
    canvas.text(at, text, face, color, below=below, beside=beside)


def _readable(paper: Rgb) -> Rgb:
    return max((COLORS["black"], COLORS["white"]), key=lambda color: distance(color, paper))
