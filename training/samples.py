"""What a sample is, and when an answer to it counts as right. Knows nothing of how pictures are drawn."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

OTHER_NUMBER = "#"  # in `forbidden`: any number that is not a key
OTHER_QUOTE = '"'  # in `forbidden`: any quoted text that is not a key

SKILLS = (
    "color",
    "shape",
    "size",
    "position",
    "count",
    "words",
    "numbers",
    "chart",
    "table",
    "several",
    "absent",
    "json",
    "caption",
    "chat",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question, its canonical answer, and what any right answer must hold."""

    skill: str  # one of SKILLS
    text: str
    answer: str  # what the model is trained to say; a function of the picture and the question
    keys: tuple[str, ...]  # each must occur, as whole words; for skill json: the JSON value itself
    forbidden: tuple[str, ...] = ()  # none may occur as whole words; OTHER_NUMBER and OTHER_QUOTE are patterns


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """A drawn picture, and what covers the middle of each patch once it is resized to its grid."""

    image: Image.Image  # as a user would send it: any size
    size: tuple[int, int]  # width and height after the image processor, multiples of a token's side
    glyphs: npt.NDArray[np.uint8]  # [rows, columns] of patches: class of the letter, digit or shape; 0 is nothing
    colors: npt.NDArray[np.uint8]  # [rows, columns]: class of the colour; 0 is the background

    def resized(self) -> Image.Image:
        return self.image if self.image.size == self.size else self.image.resize(self.size, Image.Resampling.BICUBIC)


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """Pictures and questions about them, in the order they are asked; an evaluation sample has one question."""

    pictures: tuple[Picture, ...]
    questions: tuple[Question, ...]

    @property
    def skill(self) -> str:
        return self.questions[0].skill


def is_right(question: Question, given: str) -> bool:
    """Strict and independent of wording: every key is there and nothing that contradicts it."""
    if question.skill == "json":
        return _same_json(question.keys[0], given)
    text = _plain(given)
    keys = [_plain(key) for key in question.keys]
    return all(_holds(text, key) for key in keys) and not any(_contradicts(text, keys, f) for f in question.forbidden)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _contradicts(text: str, keys: list[str], forbidden: str) -> bool:
    if forbidden == OTHER_NUMBER:
        return any(number not in keys for number in re.findall(r"\d+", text))
    if forbidden == OTHER_QUOTE:
        return any(quoted not in keys for quoted in re.findall(r'"([^"]*)"', text))
    return _holds(text, _plain(forbidden))


def _same_json(expected: str, given: str) -> bool:
    try:
        return bool(_unordered(json.loads(given)) == _unordered(json.loads(expected)))
    except ValueError:
        return False


def _unordered(value: Any) -> Any:
    """Lists of objects compare as bags: the order of the shapes in a picture is nobody's business."""
    if isinstance(value, list):
        return sorted(json.dumps(item, sort_keys=True) for item in value)
    return value
