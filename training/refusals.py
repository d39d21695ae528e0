"""Scenes outside of what the model knows, and the one sentence it says about them, whatever the question."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image

from training import textures
from training.canvas import PATCH
from training.photos import compressed, varied, window
from training.samples import Picture, Question
from training.schemas import Schema, closed, optional
from training.sheet import Sheet
from training.textures import Size, Texture

REFUSAL = "I cannot read this picture: I know drawn shapes, text, charts, tables and documents."
REFUSED = "I cannot read this picture"  # what makes an answer a refusal


class Sources(NamedTuple):
    """Where pictures to refuse come from."""

    textures: tuple[Texture, ...]
    photos: tuple[Image.Image, ...] = ()  # may be none: then textures alone


TRAINED_ON = Sources(textures.TRAINED)
HELD_OUT_SOURCES = Sources(textures.HELD_OUT)
_OF_PHOTOS = 0.65  # share of photos, where there are any

_ASKED = (
    *(
        "What is this?",
        "What is in this photo?",
        "What do you see in the photo?",
        "Describe this photo.",
        "What is it?",
    ),
    *("What animal is this?", "Who is this?", "Who is the person in the picture?", "What is the person doing?"),
    *("Where was this taken?", "What place is this?", "Which city is this?", "Which country is on the map?"),
    *("Is there a dog in the picture?", "Is there a person?", "How many people are there?", "How many cars are there?"),
    *("What color is the car?", "What color is the sky?", "What is the weather like?", "Is it day or night?"),
    *("What breed is the dog?", "What kind of flower is this?", "What food is this?", "Is this food healthy?"),
    *("Write a caption for this image.", "Describe the image in one sentence.", "Tell me about this picture."),
    *("What does the sign say?", "Read the text.", "What does it say?", "What is written here?", "Read the number."),
    *("What is in the background?", "What is in the foreground?", "Is the person happy?", "How old is this person?"),
    *("What shape is this?", "What color is it?", "How many shapes are there?", "Describe the picture."),
    *("List the objects as JSON.", "Describe the image as JSON.", "Which bar is the largest?", "What is the total?"),
    *("Explain this image.", "What happens here?", "What material is this?", "Is this a real photo?", "What's this?"),
)


Held = tuple[str, Schema]  # a question and the schema its answer is held to


class RefuseScene:
    skills: tuple[str, ...] = ("refuse",)

    def __init__(self, rng: Random, sheets: Sequence[Sheet], sources: Sources, asked: Sequence[str]) -> None:
        """`asked` are questions about drawings, which are asked here, too."""
        self._asked = asked
        self.pictures: tuple[Picture, ...] = tuple(_picture(rng, sheet, sources) for sheet in sheets)

    def ask(self, rng: Random, skill: str) -> Question | None:
        text = rng.choice(self._asked if self._asked and rng.random() < 0.55 else _ASKED)
        return Question("refuse", text, REFUSAL, (REFUSED,))


class ClosedScene(RefuseScene):
    """The same under a schema, which lets no sentence through: an answer without data, that ends at once."""

    skills = ("extract", "extract", "refuse")

    def __init__(
        self, rng: Random, sheets: Sequence[Sheet], sources: Sources, asked: Sequence[str], held: Sequence[Held]
    ) -> None:
        super().__init__(rng, sheets, sources, asked)
        self._held = held

    def ask(self, rng: Random, skill: str) -> Question | None:
        if skill == "refuse":
            return super().ask(rng, skill)
        text, schema = rng.choice(self._held)
        if rng.random() < 0.6:
            schema = optional(rng, schema)
        answer = closed(schema)
        return Question("extract", text, answer, (answer,), schema=schema)


class RefuseClip(RefuseScene):
    """A video of such a thing: the frames are windows that move over one picture."""

    def __init__(self, rng: Random, sheet: Sheet, frames: int, sources: Sources, asked: Sequence[str]) -> None:
        self._asked = asked
        wide, high = sheet.drawn
        whole = outside(rng, (int(wide * 1.2), int(high * 1.2)), sources)
        dx, dy = rng.uniform(0, whole.width - wide), rng.uniform(0, whole.height - high)
        shown = []
        for frame in range(frames):
            left, top = int(dx * frame / frames), int(dy * frame / frames)
            shown.append(_unlabelled(whole.crop((left, top, left + wide, top + high)), sheet))
        self.pictures = tuple(shown)


def outside(rng: Random, size: Size, sources: Sources) -> Image.Image:
    """A photograph or a texture, or one shining through the other."""
    if sources.photos and rng.random() < _OF_PHOTOS:
        image = window(rng, rng.choice(sources.photos), size)
        if rng.random() < 0.1:
            image = Image.blend(image, rng.choice(sources.textures)(rng, size), rng.uniform(0.15, 0.5))
    else:
        image = rng.choice(sources.textures)(rng, size)
    image = varied(rng, image)
    return compressed(rng, image) if rng.random() < 0.3 else image


def _picture(rng: Random, sheet: Sheet, sources: Sources) -> Picture:
    return _unlabelled(outside(rng, sheet.drawn, sources), sheet)


def _unlabelled(image: Image.Image, sheet: Sheet) -> Picture:
    """No patch of it holds anything that has a class."""
    nothing = np.zeros((sheet.size[1] // PATCH, sheet.size[0] // PATCH), np.uint8)
    return Picture(image, sheet.size, nothing, nothing, image, None)
