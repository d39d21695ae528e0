"""What a sample is. Knows neither how pictures are drawn nor when an answer counts as right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.apps.evaluation.image_noise import Grain
from saccade.apps.evaluation.scoring import AnswerRule

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
    "document",
    "extract",
    "tool",
    "refuse",
    "compare",
    "choice",
    "video",
)
FIRST_SKILLS = SKILLS[: SKILLS.index("chat") + 1]  # of the first thousand held-out questions
_JSON_SKILLS = ("json", "extract", "tool")
MOST_JSON_TOKENS = 128  # within which an answer in JSON must end
UNKNOWN = 255  # class of a patch that two frames of a video cover differently
Tool = Mapping[str, Any]  # as in a request


@dataclass(frozen=True, slots=True)
class Question:
    """One question, its canonical answer, and what any right answer must hold."""

    skill: str  # one of SKILLS
    text: str
    answer: str  # what the model is trained to say; a function of the picture and the question
    keys: tuple[str, ...]  # each must occur, as whole words; where the answer is JSON: the JSON value itself
    forbidden: tuple[str, ...] = ()  # see AnswerRule
    schema: Mapping[str, Any] | None = None  # the server holds the answer to it; the question says nothing of it
    tools: tuple[Tool, ...] = ()  # of the request
    role: str = "user"  # or "tool": the text is what a tool returned

    @property
    def rule(self) -> AnswerRule:
        is_json = self.skill in _JSON_SKILLS and self.answer[0] in "[{<"
        return AnswerRule(self.keys, "json" if is_json else "all", self.forbidden)

    @property
    def request(self) -> dict[str, Any]:
        """Further fields of a request that asks it."""
        held = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema}}
        return {
            **({"response_format": held} if self.schema else {}),
            **({"tools": list(self.tools)} if self.tools else {}),
            **({"max_tokens": MOST_JSON_TOKENS} if self.skill in ("extract", "tool") else {}),
        }


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """A drawn picture, and what covers the middle of each patch once it is resized to its grid."""

    image: Image.Image  # as a user would send it: any size
    size: tuple[int, int]  # width and height after the image processor, multiples of a token's side
    glyphs: npt.NDArray[np.uint8]  # [rows, columns] of patches: class of the letter, digit or shape; 0 is nothing
    colors: npt.NDArray[np.uint8]  # [rows, columns]: class of the colour; 0 is the background
    clean: Image.Image  # before noise was added
    grain: Grain | None  # the noise, where there is any
    links: npt.NDArray[np.uint8] | None = None  # [NUM_LINKS, rows, columns]: letters of a value's labels; 0 is none

    def resized(self) -> Image.Image:
        return self.image if self.image.size == self.size else self.image.resize(self.size, Image.Resampling.BICUBIC)


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """Pictures and questions about them, in the order they are asked; an evaluation sample has one question."""

    pictures: tuple[Picture, ...]
    questions: tuple[Question, ...]
    is_video: bool = False  # the pictures are the frames of one video

    @property
    def skill(self) -> str:
        return self.questions[0].skill
