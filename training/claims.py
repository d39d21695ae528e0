"""Claims about shapes that are true or false: to be asked with yes or no."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from training.palette import NAMES
from training.shape_questions import plural
from training.shapes import Shape, ShapeScene

_SIDES = (("left of", 0, -1), ("to the left of", 0, -1), ("right of", 0, 1), ("above", 1, -1), ("below", 1, 1))
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


class Claim(NamedTuple):
    question: str  # "Is the square blue?"
    said: str  # "the square is blue"
    is_true: bool
    is_short: bool = True  # its question is answered by yes or no even where nothing asks for that


def draw_claim(rng: Random, scene: ShapeScene) -> Claim | None:
    return rng.choice((_color, _color, _beside, _beside, _count, _larger))(rng, scene)


def _color(rng: Random, scene: ShapeScene) -> Claim | None:
    shape = rng.choice(scene.shapes)
    if len(scene.having(kind=shape.kind)) > 1:
        return None
    is_true = rng.random() < 0.5
    seen = [one.color for one in scene.shapes if one.color != shape.color]
    wrong = rng.choice(seen if seen and rng.random() < 0.5 else [name for name in NAMES if name != shape.color])
    color = shape.color if is_true else wrong
    return Claim(f"Is the {shape.kind} {color}?", f"the {shape.kind} is {color}", is_true)


def _beside(rng: Random, scene: ShapeScene) -> Claim | None:
    pair = _pair(rng, scene)
    if pair is None:
        return None
    (one, first), (two, second) = pair
    word, axis, sign = rng.choice(_SIDES)
    gap = scene.fraction(one)[axis] - scene.fraction(two)[axis]
    if abs(gap) < 0.1:
        return None
    return Claim(f"Is the {first} {word} the {second}?", f"the {first} is {word} the {second}", gap * sign > 0, False)


def _larger(rng: Random, scene: ShapeScene) -> Claim | None:
    pair = _pair(rng, scene)
    if pair is None:
        return None
    (one, first), (two, second) = pair
    if max(one.radius, two.radius) < 1.4 * min(one.radius, two.radius):
        return None
    word = rng.choice(("larger", "bigger", "smaller"))
    is_true = (one.radius > two.radius) == (word != "smaller")
    return Claim(f"Is the {first} {word} than the {second}?", f"the {first} is {word} than the {second}", is_true)


def _count(rng: Random, scene: ShapeScene) -> Claim:
    shape = rng.choice(scene.shapes)
    noun, count = rng.choice((("shape", len(scene.shapes)), (shape.kind, len(scene.having(kind=shape.kind)))))
    is_true = rng.random() < 0.5
    shown = count if is_true else rng.choice([n for n in (count - 1, count + 1, count + 2) if n > 1])
    number = _WORDS[shown] if rng.random() < 0.5 else str(shown)
    verb, thing = ("is", f"{number} {noun}") if shown == 1 else ("are", f"{number} {plural(noun)}")
    return Claim(f"{verb.capitalize()} there {thing}?", f"there {verb} {thing}", is_true)


def _pair(rng: Random, scene: ShapeScene) -> tuple[tuple[Shape, str], tuple[Shape, str]] | None:
    """Two shapes, each with a name that fits no other."""
    unique = scene.unique()
    if len(unique) < 2:
        return None
    one, two = rng.sample(unique, 2)
    is_short = all(len(scene.having(kind=shape.kind)) == 1 for shape in (one, two))
    return (one, one.kind if is_short else one.name), (two, two.kind if is_short else two.name)
