"""What a sample is. Knows neither how pictures are drawn nor when an answer counts as right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.evaluation.image_noise import Grain
from saccade.evaluation.scoring import Rule

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
    forbidden: tuple[str, ...] = ()  # see Rule

    @property
    def rule(self) -> Rule:
        return Rule(self.keys, "json" if self.skill == "json" else "all", self.forbidden)


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """A drawn picture, and what covers the middle of each patch once it is resized to its grid."""

    image: Image.Image  # as a user would send it: any size
    size: tuple[int, int]  # width and height after the image processor, multiples of a token's side
    glyphs: npt.NDArray[np.uint8]  # [rows, columns] of patches: class of the letter, digit or shape; 0 is nothing
    colors: npt.NDArray[np.uint8]  # [rows, columns]: class of the colour; 0 is the background
    clean: Image.Image  # before noise was added
    grain: Grain | None  # the noise, where there is any

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
