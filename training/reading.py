"""Scenes of written text: words and numbers, one or several to a picture."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from saccade.apps.evaluation.scoring import OTHER_NUMBER, OTHER_QUOTE
from training.canvas import Canvas
from training.fonts import font, font_names
from training.off_topic import off_topic
from training.palette import NAMES, background, ink
from training.samples import Picture, Question
from training.shape_questions import DESCRIBE
from training.sheet import Sheet, listed, others
from training.words import number, word

SMALLEST = 20  # font size in pixels that the model card promises: capitals 14 px high
SMALLEST_TRAINED = 16  # a margin below it
LARGEST = 72
LONGEST_WORD = 8
LONGEST_NUMBER = 6
_ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    font_name: str
    size: int  # font size, pixels
    width: int
    height: int  # of the row it takes


class TextScene:
    skills: tuple[str, ...] = ("words", "numbers", "color", "caption", "absent")

    def __init__(
        self, rng: Random, sheet: Sheet, skill: str, level: float = 1.0, *, most: int = 4, smallest: int = SMALLEST
    ) -> None:
        """`level` in 0..1 sets how long the text may be: training starts with short ones."""
        self.lines = _lines(rng, sheet, skill, level, most, smallest)
        self.texts = [line.text for line in self.lines]
        paper, _ = background(rng, [])
        color, self.color = ink(rng, paper)
        canvas = Canvas(sheet.size, sheet.drawn, paper)
        spare = max(0, canvas.height - sum(line.height for line in self.lines))
        y = 0
        for left, line in zip(range(len(self.lines), 0, -1), self.lines, strict=True):
            skip = rng.randint(0, spare // left)
            spare, y = spare - skip, y + skip
            x = rng.randint(1, max(1, canvas.width - line.width - 1))
            shift = font(line.font_name, line.size).getbbox(line.text)[1]
            at = (x, y - int(shift) + 2)
            canvas.text(
                at, line.text, font(line.font_name, line.size), color, NAMES.index(self.color) + 1 if self.color else 0
            )
            y += line.height
        self.pictures: tuple[Picture, ...] = (canvas.finish(rng),)

    @property
    def words(self) -> list[str]:
        return [text for text in self.texts if not text.isdigit()]

    @property
    def numbers(self) -> list[str]:
        return [text for text in self.texts if text.isdigit()]

    def ask(self, rng: Random, skill: str) -> Question | None:
        if skill == "color":
            return self._color(rng)
        if skill == "caption":
            text = rng.choice(DESCRIBE)
            return Question("caption", text, f"The picture shows {self._nouns()}.", tuple(self.texts), (OTHER_QUOTE,))
        if skill == "absent" and rng.random() < 0.3:
            return off_topic(rng, "absent")
        if skill == "absent":
            thing = rng.choice(("circle", "square", "triangle", "star", "heart", "dog", "cat", "car"))
            text = rng.choice((f"What color is the {thing}?", f"Where is the {thing}?"))
            return Question("absent", text, f"There is no {thing} in the picture.", (f"no {thing}",))
        return self._words(rng) if skill == "words" else self._numbers(rng)

    def _words(self, rng: Random) -> Question | None:
        if len(self.words) == len(self.texts) == 1:
            text = rng.choice(_READ_WORD)
            return Question("words", text, f'It says "{self.texts[0]}".', (self.texts[0],), (OTHER_QUOTE,))
        if len(self.words) != len(self.texts):
            if len(self.words) != 1:
                return None
            text = rng.choice(("What word is in the picture?", "Read the word.", "What is the word?"))
            return Question("words", text, f'The word is "{self.words[0]}".', (self.words[0],), (OTHER_QUOTE,))
        if rng.random() < 0.4:
            text = rng.choice(
                ("Read all the words.", "What words are in the picture?", "What does it say?", "Read the text.")
            )
            quoted = listed([f'"{w}"' for w in self.words])
            return Question("words", text, f"The words are {quoted}.", tuple(self.words), (OTHER_QUOTE,))
        which = rng.randrange(len(self.words))
        place = _place(rng, which, len(self.words))
        text = rng.choice((f"What is the {place} word?", f"Read the {place} word.", f"What does the {place} line say?"))
        return Question(
            "words", text, f'The {place} word is "{self.words[which]}".', (self.words[which],), (OTHER_QUOTE,)
        )

    def _numbers(self, rng: Random) -> Question | None:
        if not self.numbers:
            return None
        if len(self.numbers) == 1:
            text = rng.choice(_READ_NUMBER)
            return Question("numbers", text, f"The number is {self.numbers[0]}.", (self.numbers[0],), (OTHER_NUMBER,))
        if len(self.numbers) != len(self.texts):
            return None
        if rng.random() < 0.4:
            text = rng.choice(
                ("Read all the numbers.", "What numbers are in the picture?", "Which numbers do you see?")
            )
            answer = f"The numbers are {listed(self.numbers)}."
            return Question("numbers", text, answer, tuple(self.numbers), (OTHER_NUMBER,))
        which = rng.randrange(len(self.numbers))
        place = _place(rng, which, len(self.numbers))
        text = rng.choice((f"What is the {place} number?", f"Read the {place} number."))
        key = self.numbers[which]
        return Question("numbers", text, f"The {place} number is {key}.", (key,), (OTHER_NUMBER,))

    def _color(self, rng: Random) -> Question | None:
        if self.color is None:
            return None
        text = rng.choice(("What color is the text?", "Which color does the text have?", "What colour is the text?"))
        return Question("color", text, f"The text is {self.color}.", (self.color,), others(NAMES, self.color))

    def _nouns(self) -> str:
        return listed([f"the number {t}" if t.isdigit() else f'the word "{t}"' for t in self.texts])


_READ_WORD = (
    "What does it say?",
    "What does the picture say?",
    "What does the text say?",
    "What is written here?",
    "What is written in the picture?",
    "What word is this?",
    "Which word do you see?",
    "Read the word.",
    "Read the text.",
    "Read the text in the picture.",
    "What is the word in the picture?",
    "Please read this.",
)
_READ_NUMBER = (
    "What number is this?",
    "What number is shown?",
    "Which number do you see?",
    "What is the number?",
    "What is the number in the picture?",
    "Read the number.",
    "Please read the number.",
)


def _place(rng: Random, which: int, count: int) -> str:
    names = [_ORDINALS[which]]
    if which == 0:
        names.append("top")
    if which == count - 1:
        names += ["last", "bottom"]
    return rng.choice(names)


def _lines(rng: Random, sheet: Sheet, skill: str, level: float, most: int, smallest: int) -> list[Line]:
    """One to four lines that fit the sheet, top to bottom."""
    most = min(most, (sheet.drawn[1] - 6) // (smallest + 12))
    count = min(max(1, most), rng.choice((1, 1, 1, 2, 2, 3, 4)))
    is_mixed = count == 2 and rng.random() < 0.3
    room = (sheet.drawn[1] - 4) // count
    lines = []
    for index in range(count):
        is_number = (skill == "numbers") != (is_mixed and index == 1)
        lines.append(_line(rng, is_number, sheet.drawn[0] - 4, room, level, smallest))
    if is_mixed and rng.random() < 0.5:
        lines.reverse()
    return lines


def _line(rng: Random, is_number: bool, width: int, height: int, level: float, smallest: int) -> Line:
    """A text in the largest size that fits, or a smaller one; shorter text where even the smallest is too wide."""
    name = rng.choice(font_names())
    longest = LONGEST_NUMBER if is_number else LONGEST_WORD
    longest = max(3, round(longest * level))
    while True:
        text = number(rng, longest) if is_number else word(rng, longest)
        unit = font(name, 100).getlength(text) / 100
        largest = int(min(LARGEST, width / unit, height / 1.35))
        if largest >= smallest or longest <= 3:
            break
        longest -= 1
    size = max(min(smallest, largest), int(smallest + (largest - smallest) * rng.random() ** 1.5))
    return Line(text, name, size, int(unit * size) + 2, int(size * 1.3))
