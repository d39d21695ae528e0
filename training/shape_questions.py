"""Questions about coloured shapes: colour, kind, size, position, count, captions, JSON, and what is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from saccade.apps.evaluation.scoring import OTHER_NUMBER
from training.canvas import KINDS
from training.extract import ask_json
from training.off_topic import off_topic
from training.palette import NAMES
from training.samples import Question
from training.sheet import listed, others

if TYPE_CHECKING:
    from training.shapes import Shape, ShapeScene

_PLACES = {
    (0, 0): "top left",
    (1, 0): "top",
    (2, 0): "top right",
    (0, 1): "left",
    (1, 1): "center",
    (2, 1): "right",
    (0, 2): "bottom left",
    (1, 2): "bottom",
    (2, 2): "bottom right",
}
_PLACE_WORDS = ("top", "bottom", "left", "right", "center", "middle")
_THINGS = ("dog", "cat", "car", "person", "house", "tree", "bird", "flower", "chair", "boat", "horse", "face")
_COLOR_WORDS = ("color", "color", "colour")


def _color(scene: ShapeScene, rng: Random) -> Question | None:
    word = rng.choice(_COLOR_WORDS)
    if scene.paper_name and rng.random() < 0.15:
        text = rng.choice((f"What {word} is the background?", f"Which {word} does the background have?"))
        return _about_color(text, "The background", scene.paper_name)
    if len(scene.shapes) == 1 and rng.random() < 0.4:
        text = rng.choice((f"What {word} is it?", f"What {word} is the shape?", f"Which {word} is this shape?"))
        return _about_color(text, "The shape", scene.shapes[0].color)
    named = [s for s in scene.shapes if len(scene.having(kind=s.kind)) == 1]
    if not named:
        return None
    shape = rng.choice(named)
    text = rng.choice(
        (
            f"What {word} is the {shape.kind}?",
            f"Which {word} is the {shape.kind}?",
            f"What is the {word} of the {shape.kind}?",
            f"Tell me the {word} of the {shape.kind}.",
            f"The {shape.kind} has which {word}?",
            f"Name the {word} of the {shape.kind}.",
        )
    )
    return _about_color(text, f"The {shape.kind}", shape.color)


def _about_color(text: str, subject: str, color: str) -> Question:
    return Question("color", text, f"{subject} is {color}.", (color,), others(NAMES, color))


def _kind(scene: ShapeScene, rng: Random) -> Question | None:
    if len(scene.shapes) == 1 and rng.random() < 0.5:
        shape, subject = scene.shapes[0], "It"
        text = rng.choice(("What shape is this?", "What shape is it?", "Which shape do you see?", "Name the shape."))
    else:
        named = [s for s in scene.shapes if len(scene.having(color=s.color)) == 1]
        if not named:
            return None
        shape = rng.choice(named)
        subject = f"The {shape.color} shape"
        text = rng.choice(
            (
                f"What is the {shape.color} shape?",
                f"What shape is {shape.color}?",
                f"Which shape is {shape.color}?",
                f"What kind of shape is the {shape.color} one?",
                f"Name the {shape.color} shape.",
                f"What is {shape.color}?",
            )
        )
    return Question("shape", text, f"{subject} is {a(shape.kind)}.", (shape.kind,), others(KINDS, shape.kind))


def _size(scene: ShapeScene, rng: Random) -> Question | None:
    unique = scene.unique()
    kind = rng.random()
    if kind < 0.3:
        return _large_or_small(scene, rng, unique)
    by_size = sorted(scene.shapes, key=lambda s: s.radius)
    if kind < 0.6 and len(by_size) > 1:
        is_largest = rng.random() < 0.5
        first, second = (by_size[-1], by_size[-2]) if is_largest else (by_size[0], by_size[1])
        if first not in unique or not _is_clear(first, second):
            return None
        word = rng.choice(("largest", "biggest") if is_largest else ("smallest",))
        text = rng.choice((f"What is the {word} shape?", f"Which shape is the {word}?", f"Name the {word} shape."))
        wrong = [s.name for s in scene.shapes if s.name != first.name]
        return Question("size", text, f"The {word} shape is the {first.name}.", (first.name,), tuple(wrong))
    if len(unique) < 2:
        return None
    one, two = rng.sample(unique, 2)
    if not _is_clear(one, two):
        return None
    word = rng.choice(("larger", "bigger", "smaller"))
    right, wrong_one = (one, two) if (one.radius < two.radius) == (word == "smaller") else (two, one)
    text = rng.choice(
        (
            f"Which is {word}, the {one.name} or the {two.name}?",
            f"Which shape is {word}: the {one.name} or the {two.name}?",
            f"Is the {one.name} or the {two.name} {word}?",
        )
    )
    return Question("size", text, f"The {right.name} is {word}.", (right.name,), (wrong_one.name,))


def _is_clear(one: Shape, two: Shape) -> bool:
    return max(one.radius, two.radius) > 1.4 * min(one.radius, two.radius)


def _large_or_small(scene: ShapeScene, rng: Random, unique: list[Shape]) -> Question | None:
    if not unique:
        return None
    shape = rng.choice(unique)
    part = 2 * shape.radius / scene.sheet.short
    if 0.26 < part < 0.42:
        return None
    word = "small" if part <= 0.26 else "large"
    text = rng.choice((f"Is the {shape.name} large or small?", f"Is the {shape.name} small or large?"))
    wrong = ("large", "big") if word == "small" else ("small", "little")
    return Question("size", text, f"The {shape.name} is {word}.", (word,), wrong)


def _position(scene: ShapeScene, rng: Random) -> Question | None:
    kind = rng.random()
    if kind < 0.45:
        return _where(scene, rng)
    return _relation(scene, rng) if kind < 0.75 else _outermost(scene, rng)


def _where(scene: ShapeScene, rng: Random) -> Question | None:
    clear = [s for s in scene.unique() if _place_of(scene, s)]
    if not clear:
        return None
    shape = rng.choice(clear)
    place = _place_of(scene, shape)
    assert place is not None
    if rng.random() < 0.35 and all(_place_of(scene, s, 0.0) != place for s in scene.shapes if s is not shape):
        text = rng.choice((f"What is {_at(place)}?", f"Which shape is {_at(place)}?", f"What do you see {_at(place)}?"))
        wrong = tuple(s.name for s in scene.shapes if s.name != shape.name)
        return Question("position", text, f"The {shape.name} is {_at(place)}.", (shape.name,), wrong)
    text = rng.choice(
        (
            f"Where is the {shape.name}?",
            f"Where in the picture is the {shape.name}?",
            f"What is the position of the {shape.name}?",
            f"In which part of the picture is the {shape.name}?",
        )
    )
    return Question("position", text, f"The {shape.name} is {_at(place)}.", (place,), others(_PLACE_WORDS, place))


def _place_of(scene: ShapeScene, shape: Shape, margin: float = 0.04) -> str | None:
    """Which ninth of the picture a shape's centre lies in; None when it is within `margin` of a border."""
    cells = []
    for part in scene.fraction(shape):
        if min(abs(part - 1 / 3), abs(part - 2 / 3)) < margin:
            return None
        cells.append(min(2, int(part * 3)))
    return _PLACES[cells[0], cells[1]]


def _at(place: str) -> str:
    if place == "center":
        return "in the center"
    return f"on the {place}" if place in ("left", "right") else f"at the {place}"


_SIDES = {"to the left of": (0, -1), "to the right of": (0, 1), "above": (1, -1), "below": (1, 1)}


def _relation(scene: ShapeScene, rng: Random) -> Question | None:
    unique = scene.unique()
    if len(unique) < 2:
        return None
    one, two = rng.sample(unique, 2)
    word = rng.choice(tuple(_SIDES))
    axis, sign = _SIDES[word]
    gap = scene.fraction(one)[axis] - scene.fraction(two)[axis]
    if abs(gap) < 0.1:
        return None
    is_so = gap * sign > 0
    if len(scene.shapes) == 2 and is_so and rng.random() < 0.4:
        text = rng.choice((f"What is {word} the {two.name}?", f"Which shape is {word} the {two.name}?"))
        return Question("position", text, f"The {one.name} is {word} the {two.name}.", (f"{one.name} is {word}",))
    text = f"Is the {one.name} {word} the {two.name}?"
    if is_so:
        return Question("position", text, f"Yes, the {one.name} is {word} the {two.name}.", ("yes",), ("no", "not"))
    return Question("position", text, f"No, the {one.name} is not {word} the {two.name}.", ("no",), ("yes",))


def _outermost(scene: ShapeScene, rng: Random) -> Question | None:
    if len(scene.shapes) < 2:
        return None
    word, axis, sign = rng.choice((("leftmost", 0, 1), ("rightmost", 0, -1), ("topmost", 1, 1), ("lowest", 1, -1)))
    ordered = sorted(scene.shapes, key=lambda s: sign * scene.fraction(s)[axis])
    first, gap = ordered[0], abs(scene.fraction(ordered[0])[axis] - scene.fraction(ordered[1])[axis])
    if gap < 0.08 or first not in scene.unique():
        return None
    text = rng.choice((f"Which shape is the {word}?", f"What is the {word} shape?", f"Name the {word} shape."))
    wrong = tuple(s.name for s in scene.shapes if s.name != first.name)
    return Question("position", text, f"The {word} shape is the {first.name}.", (first.name,), wrong)


def _count(scene: ShapeScene, rng: Random) -> Question | None:
    shape, kind = rng.choice(scene.shapes), rng.random()
    if kind < 0.4:
        noun, found = "shape", scene.shapes
    elif kind < 0.6:
        noun, found = f"{shape.color} shape", scene.having(color=shape.color)
    elif kind < 0.8:
        noun, found = shape.kind, scene.having(kind=shape.kind)
    else:
        noun, found = shape.name, scene.having(shape.kind, shape.color)
    text = rng.choice(
        (
            f"How many {plural(noun)} are there?",
            f"How many {plural(noun)} are in the picture?",
            f"How many {plural(noun)} do you see?",
            f"Count the {plural(noun)}.",
            f"What is the number of {plural(noun)}?",
        )
    )
    return Question("count", text, f"{counted(len(found), noun)}.", (str(len(found)),), (OTHER_NUMBER,))


def _absent(scene: ShapeScene, rng: Random) -> Question | None:
    if rng.random() < 0.15:
        return off_topic(rng, "absent")
    kind, word = rng.random(), rng.choice(_COLOR_WORDS)
    if kind < 0.1:
        text = rng.choice(("What does the text say?", "What word is written here?", "Read the text."))
        return _missing(text, "text")
    if kind < 0.25:
        thing = rng.choice(_THINGS)
        return _missing(rng.choice((f"What {word} is the {thing}?", f"Where is the {thing}?")), thing)
    missing_kinds = [k for k in KINDS if not scene.having(kind=k)]
    if kind < 0.5:
        thing = rng.choice(missing_kinds)
        text = rng.choice((f"What {word} is the {thing}?", f"Where is the {thing}?", f"How large is the {thing}?"))
        return _missing(text, thing)
    if kind < 0.65:
        color = rng.choice([c for c in NAMES if not scene.having(color=c)])
        return _missing(rng.choice((f"What is the {color} shape?", f"Where is the {color} shape?")), f"{color} shape")
    if kind < 0.8:
        shape = rng.choice(scene.shapes)
        thing = rng.choice((shape.kind, shape.name, f"{shape.color} shape"))
        return Question("absent", _is_there(rng, thing), f"Yes, there is {a(thing)}.", ("yes",), ("no", "not"))
    shape = rng.choice(scene.shapes)
    color = rng.choice([c for c in NAMES if not scene.having(shape.kind, c)])
    thing = rng.choice((rng.choice(missing_kinds), f"{color} {shape.kind}"))
    return Question("absent", _is_there(rng, thing), f"No, there is no {thing}.", ("no",), ("yes",))


def _missing(text: str, thing: str) -> Question:
    return Question("absent", text, f"There is no {thing} in the picture.", (f"no {thing}",))


def _is_there(rng: Random, thing: str) -> str:
    return rng.choice((f"Is there {a(thing)}?", f"Is there {a(thing)} in the picture?", f"Do you see {a(thing)}?"))


def _json(scene: ShapeScene, rng: Random) -> Question | None:
    if len(scene.shapes) > 4:
        return None
    found = [{"shape": s.kind, "color": s.color} for s in scene.shapes]
    text = rng.choice(
        (
            "List the shapes as JSON.",
            "List all shapes with their colors as JSON.",
            "Give the shapes in the picture as a JSON list.",
            "Return a JSON list of the shapes with shape and color.",
            "Describe the picture as JSON.",
            "Answer in JSON: which shapes are there?",
        )
    )
    answer = json.dumps(found)
    return Question("json", text, answer, (answer,))


def _extract(scene: ShapeScene, rng: Random) -> Question | None:
    return ask_json(rng, scene.record())


def _caption(scene: ShapeScene, rng: Random) -> Question | None:
    if len(scene.shapes) > 4:
        return None
    names = [s.name for s in scene.shapes]
    text = rng.choice(DESCRIBE)
    return Question("caption", text, f"The picture shows {listed([a(n) for n in names])}.", tuple(names))


DESCRIBE = (
    "Describe the picture.",
    "Describe this picture.",
    "Describe the image.",
    "What is in the picture?",
    "What is in this image?",
    "What do you see?",
    "What does the picture show?",
    "What can you see in the picture?",
    "What is this?",
    "What is shown here?",
)


def a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("s", "x")) else f"{noun}s"


def counted(count: int, noun: str) -> str:
    return f"There is 1 {noun}" if count == 1 else f"There are {count} {plural(noun)}"


ASK: dict[str, Callable[[ShapeScene, Random], Question | None]] = {
    "color": _color,
    "shape": _kind,
    "size": _size,
    "position": _position,
    "count": _count,
    "absent": _absent,
    "json": _json,
    "caption": _caption,
    "extract": _extract,
}
