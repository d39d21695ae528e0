"""Scenes of several pictures in one prompt: which picture has it, and what is in the second one."""

from __future__ import annotations

from random import Random

from saccade.apps.evaluation.scoring import OTHER_NUMBER, OTHER_QUOTE
from training.palette import NAMES
from training.reading import TextScene
from training.samples import Picture, Question
from training.shape_questions import a
from training.shapes import ShapeScene
from training.sheet import Sheet, listed, others

ORDINALS = ("first", "second", "third", "fourth")


class SeveralScene:
    skills: tuple[str, ...] = ("several",)

    def __init__(self, rng: Random, sheets: list[Sheet], level: float = 1.0) -> None:
        self.scenes = [_part(rng, sheet, level) for sheet in sheets]
        self.pictures: tuple[Picture, ...] = tuple(p for scene in self.scenes for p in scene.pictures)

    def ask(self, rng: Random, skill: str) -> Question | None:
        kind = rng.random()
        if kind < 0.1:
            text = rng.choice(
                ("How many pictures are there?", "How many pictures do you see?", "How many images are there?")
            )
            count = str(len(self.scenes))
            return Question("several", text, f"There are {count} pictures.", (count,), (OTHER_NUMBER,))
        which = rng.randrange(len(self.scenes))
        scene = self.scenes[which]
        if kind < 0.45:
            return self._which(rng, which, scene)
        if isinstance(scene, TextScene):
            return _say(rng, which, scene)
        return _describe(rng, which, scene) if kind < 0.75 else _color(rng, which, scene)

    def _which(self, rng: Random, which: int, scene: ShapeScene | TextScene) -> Question | None:
        noun = rng.choice(("picture", "image"))
        if isinstance(scene, TextScene):
            thing, has = (
                "a number" if scene.texts[0].isdigit() else "a word",
                [isinstance(s, TextScene) for s in self.scenes],
            )
        else:
            shape = rng.choice(scene.shapes)
            kind, color = rng.choice(((shape.kind, shape.color), (shape.kind, None), (None, shape.color)))
            thing = a(f"{color or ''} {kind or 'shape'}".strip())
            has = [isinstance(s, ShapeScene) and bool(s.having(kind, color)) for s in self.scenes]
        if sum(has) != 1:
            return None
        text = rng.choice(
            (f"Which {noun} has {thing}?", f"Which {noun} shows {thing}?", f"In which {noun} is {thing}?")
        )
        key = ORDINALS[which]
        return Question("several", text, f"The {key} {noun} has {thing}.", (key,), others(ORDINALS, key))


def _part(rng: Random, sheet: Sheet, level: float) -> ShapeScene | TextScene:
    if rng.random() < 0.25:
        return TextScene(rng, sheet, rng.choice(("words", "numbers")), level, most=1)
    return ShapeScene(rng, sheet, "several", most=2)


def _describe(rng: Random, which: int, scene: ShapeScene) -> Question:
    key = ORDINALS[which]
    text = rng.choice(
        (f"What is in the {key} picture?", f"What does the {key} image show?", f"Describe the {key} picture.")
    )
    names = [shape.name for shape in scene.shapes]
    return Question("several", text, f"The {key} picture shows {listed([a(n) for n in names])}.", tuple(names))


def _color(rng: Random, which: int, scene: ShapeScene) -> Question | None:
    shape, key = rng.choice(scene.shapes), ORDINALS[which]
    if len(scene.having(kind=shape.kind)) > 1:
        return None
    text = rng.choice(
        (
            f"What color is the {shape.kind} in the {key} picture?",
            f"In the {key} image, what color is the {shape.kind}?",
        )
    )
    return Question("several", text, f"The {shape.kind} is {shape.color}.", (shape.color,), others(NAMES, shape.color))


def _say(rng: Random, which: int, scene: TextScene) -> Question:
    key, said = ORDINALS[which], scene.texts[0]
    if said.isdigit():
        text = rng.choice((f"What number is in the {key} picture?", f"Read the number in the {key} image."))
        return Question("several", text, f"The number is {said}.", (said,), (OTHER_NUMBER,))
    text = rng.choice((f"What does the {key} picture say?", f"Read the word in the {key} image."))
    return Question("several", text, f'It says "{said}".', (said,), (OTHER_QUOTE,))
