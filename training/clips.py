"""Scenes of drawn videos: shapes that move, grow, shrink, appear, vanish or change their colour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from saccade.apps.evaluation.scoring import OTHER_NUMBER
from training.canvas import KIND_CLASSES, KINDS, Canvas, Points, outline
from training.palette import NAMES, Rgb, background, shade
from training.samples import Picture, Question
from training.shape_questions import a, counted, plural
from training.sheet import Sheet, listed, others

EVENTS = ("move", "move", "size", "size", "appear", "appear", "appear", "vanish", "recolor", "still")
_WAYS = {"to the left": (-1, 0), "to the right": (1, 0), "up": (0, -1), "down": (0, 1)}
_NOUNS = ("video", "clip")


@dataclass(slots=True)
class Actor:
    """A shape, and what becomes of it from the first frame (0) to the last (1)."""

    kind: str
    color: str
    x: float  # centre, pixels
    y: float
    radius: float
    dx: float = 0.0  # pixels it moves in all
    dy: float = 0.0
    growth: float = 1.0  # its last radius, as a multiple of the first
    first: int = 0  # frame in which it appears
    last: int = 99  # last frame it is in
    later: str | None = None  # its colour in the second half

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


class ClipScene:
    skills: tuple[str, ...] = ("video",)

    def __init__(self, rng: Random, sheet: Sheet, frames: int) -> None:
        self.sheet, self.frames = sheet, frames
        self.event, self.way = rng.choice(EVENTS), ""
        self.actors = self._cast(rng)
        self.actor = self.actors[0]
        _DIRECT[self.event](self, rng)
        used = {color for one in self.actors for color in (one.color, one.later) if color}
        shades = {color: shade(rng, color) for color in sorted(used)}
        self.paper, self.paper_name = background(rng, list(shades.values()))
        if self.paper_name in shades:
            self.paper_name = None
        self.pictures: tuple[Picture, ...] = self._drawn(rng, shades)

    def ask(self, rng: Random, skill: str) -> Question | None:
        kind = rng.random()
        if kind < 0.08:
            return _does_it(self, rng)
        if kind < 0.55:
            return _ASK_EVENT[self.event](self, rng)
        if kind < 0.7:
            return _what_happens(self, rng)
        return (_color if kind < 0.82 else _count if kind < 0.93 else _is_there)(self, rng)

    # --- who takes part, and what they do ---

    def _cast(self, rng: Random) -> list[Actor]:
        """Shapes of different kinds and colours, each in a stripe of its own, across its way."""
        most = min(4, self.frames // 2) if self.event == "appear" else 3
        count = rng.randint(2, most) if self.event in ("appear", "vanish") else rng.choice((1, 1, 2, 3))
        kinds, colors = rng.sample(KINDS, count), rng.sample(NAMES, count)
        wide, high = self.sheet.drawn
        if self.event == "move":
            self.way = rng.choice(tuple(_WAYS))
        is_row = self.way in ("up", "down") or (not self.way and wide > high)  # side by side
        room = (wide if is_row else high) / count
        along = high if is_row else wide
        cast = []
        for place, kind, color in zip(rng.sample(range(count), count), kinds, colors, strict=True):
            most_wide = min(room, along) / 2 - 2
            radius = rng.uniform(max(8.0, most_wide * 0.5), max(8.5, min(most_wide, along * 0.3)))
            across = rng.uniform(room * place + radius, max(room * place + radius, room * (place + 1) - radius))
            middle = rng.uniform(radius + 1, along - radius - 1)
            x, y = (across, middle) if is_row else (middle, across)
            cast.append(Actor(kind, color, x, y, radius))
        return cast

    def move(self, rng: Random) -> None:
        """From near one side to near the other, a third of the way or more."""
        sx, sy = _WAYS[self.way]
        one, length = self.actor, self.sheet.drawn[0] if sx else self.sheet.drawn[1]
        one.radius = min(one.radius, length * 0.22)
        room = length - 2 * one.radius - 2
        path = rng.uniform(0.5, 0.95) * room
        start = one.radius + 1 + rng.uniform(0, room - path)
        if sx + sy < 0:
            start = length - start
        one.x, one.y = (start, one.y) if sx else (one.x, start)
        one.dx, one.dy = sx * path, sy * path

    def size(self, rng: Random) -> None:
        factor = rng.uniform(1.8, 2.6)
        one = self.actor
        if rng.random() < 0.5:
            one.growth, one.radius = factor, max(6.0, one.radius / factor)
        else:
            one.growth = 1 / factor

    def appear(self, rng: Random) -> None:
        """One after the other, at least two frames apart."""
        spare = self.frames - 1 - 2 * (len(self.actors) - 1)
        at = 0
        for index, one in enumerate(self.actors):
            wait = rng.randint(0, spare)
            spare, at = spare - wait, at + wait
            one.first = at + 2 * index

    def vanish(self, rng: Random) -> None:
        self.actor.last = rng.randint(1, self.frames - 3)

    def recolor(self, rng: Random) -> None:
        self.actor.later = rng.choice([c for c in NAMES if all(c != one.color for one in self.actors)])

    def still(self, rng: Random) -> None:
        pass

    # --- drawing ---

    def _drawn(self, rng: Random, shades: dict[str, Rgb]) -> tuple[Picture, ...]:
        outlines = [outline(one.kind, 1.0, rng) for one in self.actors]
        pictures = []
        for frame in range(self.frames):
            canvas = Canvas(self.sheet.size, self.sheet.drawn, self.paper)
            for one, (points, hole) in zip(self.actors, outlines, strict=True):
                if one.first <= frame <= one.last:
                    self._draw(canvas, one, points, hole, frame, shades)
            pictures.append(canvas.finish(rng))
        return tuple(pictures)

    def _draw(
        self, canvas: Canvas, one: Actor, points: Points, hole: Points, frame: int, shades: dict[str, Rgb]
    ) -> None:
        part = frame / (self.frames - 1)
        radius = one.radius * one.growth**part
        color = one.later if one.later and part > 0.5 else one.color
        at = one.x + one.dx * part, one.y + one.dy * part
        classes = KIND_CLASSES[one.kind], NAMES.index(color) + 1
        canvas.shape(_scaled(points, radius), _scaled(hole, radius), at, shades[color], classes)


def _scaled(points: Points, by: float) -> Points:
    return [(x * by, y * by) for x, y in points]


# --- questions ----------------------------------------------------------------------------------------------------


def _say(text: str, answer: str, keys: tuple[str, ...], forbidden: tuple[str, ...] = ()) -> Question:
    return Question("video", text, answer, keys, forbidden)


def _thing(scene: ClipScene, rng: Random) -> str:
    """How a question names the actor."""
    one = scene.actor
    return one.kind if one.later else rng.choice((one.kind, one.name))


def _ask_move(scene: ClipScene, rng: Random) -> Question:
    one, wrong = scene.actor, others(("left", "right", "up", "down"), scene.way)
    if len(scene.actors) > 1 and rng.random() < 0.3:
        text = rng.choice(("What moves?", "Which shape moves?", f"What is moving in the {rng.choice(_NOUNS)}?"))
        return _say(text, f"The {one.name} moves {scene.way}.", (one.name,), _other_names(scene))
    thing = _thing(scene, rng)
    text = rng.choice(
        (
            f"Which way does the {thing} move?",
            f"Where does the {thing} move?",
            f"In which direction does the {thing} move?",
            f"In what direction is the {thing} moving?",
            f"Does the {thing} move {_two_ways(rng, scene.way)}?",
        )
    )
    return _say(text, f"The {one.name} moves {scene.way}.", (scene.way.split()[-1],), wrong)


def _two_ways(rng: Random, way: str) -> str:
    pair = ["to the left", "to the right"] if way.startswith("to") else ["up", "down"]
    rng.shuffle(pair)
    return " or ".join(pair)


def _ask_size(scene: ClipScene, rng: Random) -> Question:
    one, grows = scene.actor, scene.actor.growth > 1
    says, wrong = ("grows", "shrinks") if grows else ("shrinks", "grows")
    thing, kind = _thing(scene, rng), rng.random()
    if kind < 0.2 and len(scene.actors) > 1:
        text = rng.choice((f"What {says}?", f"Which shape {says}?"))
        return _say(text, f"The {one.name} {says}.", (one.name,), _other_names(scene))
    if kind < 0.35:
        text = rng.choice((f"Does the {thing} grow?", f"Does the {thing} get bigger?", f"Does the {thing} get larger?"))
        answer = f"Yes, the {one.name} grows." if grows else f"No, the {one.name} shrinks."
        return _say(text, answer, ("yes" if grows else "no",), ("no" if grows else "yes",))
    text = rng.choice(
        (
            f"Does the {thing} grow or shrink?",
            f"Does the {thing} shrink or grow?",
            f"How does the size of the {thing} change?",
            f"Does the {thing} get larger or smaller?",
        )
    )
    return _say(text, f"The {one.name} {says}.", (says,), (wrong,))


def _ask_appear(scene: ClipScene, rng: Random) -> Question:
    names, kind = [one.name for one in scene.actors], rng.random()
    if kind < 0.3:
        text = rng.choice(
            ("In which order do the shapes appear?", "What appears, in order?", "Name the shapes in order.")
        )
        ordered = f"First the {names[0]}, then the {', then the '.join(names[1:])}."
        return _say(text, ordered, (ordered.removesuffix("."),))
    if kind < 0.5 and len(names) > 2:
        index = rng.randrange(len(names) - 1)
        text = rng.choice((f"What appears after the {names[index]}?", f"Which shape follows the {names[index]}?"))
        right = names[index + 1]
        return _say(text, f"After the {names[index]} the {right} appears.", (f"the {right} appears",))
    places = [("first", names[0]), ("last", names[-1])]
    if rng.random() < 0.3:
        places = list(zip(("second", "third", "fourth"), names[1:], strict=False))
    word, right = rng.choice(places)
    text = rng.choice((f"What appears {word}?", f"Which shape appears {word}?", f"Which shape comes {word}?"))
    return _say(text, f"The {right} appears {word}.", (right,), tuple(n for n in names if n != right))


def _ask_vanish(scene: ClipScene, rng: Random) -> Question:
    one = scene.actor
    if rng.random() < 0.4:
        return _counts(scene, rng, rng.random() < 0.5)
    text = rng.choice(
        ("What disappears?", "Which shape disappears?", "Which shape is gone at the end?", "What vanishes?")
    )
    return _say(text, f"The {one.name} disappears.", (one.name,), _other_names(scene))


def _ask_recolor(scene: ClipScene, rng: Random) -> Question:
    one, kind = scene.actor, rng.random()
    assert one.later is not None
    if kind < 0.3 and len(scene.actors) > 1:
        text = rng.choice(("Which shape changes its color?", "What changes its color?"))
        right = (f"{one.kind} changes",)
        return _say(text, f"The {one.kind} changes from {one.color} to {one.later}.", right)
    if kind < 0.65:
        is_end = rng.random() < 0.5
        color, when = (one.later, "end") if is_end else (one.color, "start")
        text = f"What color is the {one.kind} at the {when}?"
        return _say(text, f"At the {when} the {one.kind} is {color}.", (color,), others(NAMES, color))
    text = rng.choice((f"How does the color of the {one.kind} change?", f"What happens to the {one.kind}?"))
    said = f"The {one.kind} changes from {one.color} to {one.later}."
    return _say(text, said, (f"from {one.color} to {one.later}",))


def _ask_still(scene: ClipScene, rng: Random) -> Question:
    text = rng.choice(("What moves?", "Does anything move?", "What changes?", "Does anything change?"))
    if text.startswith("Does"):
        return _say(text, "No, nothing changes.", ("no",), ("yes",))
    return _say(text, "Nothing changes.", ("nothing",))


def _what_happens(scene: ClipScene, rng: Random) -> Question:
    noun = rng.choice(_NOUNS)
    text = rng.choice(
        (
            f"What happens in the {noun}?",
            f"Describe the {noun}.",
            "What happens?",
            f"What does the {noun} show?",
            "What changes?",
        )
    )
    return _say(text, *_happens(scene))


def _happens(scene: ClipScene) -> tuple[str, tuple[str, ...]]:
    """The event in a sentence, and the keys of it."""
    one = scene.actor
    if scene.event == "appear":
        names = [a(other.name) for other in scene.actors]
        return f"{listed(names).capitalize()} appear.", tuple(other.name for other in scene.actors)
    says = {
        "move": f"The {one.name} moves {scene.way}.",
        "size": f"The {one.name} {'grows' if one.growth > 1 else 'shrinks'}.",
        "vanish": f"The {one.name} disappears.",
        "recolor": f"The {one.kind} changes from {one.color} to {one.later}.",
        "still": "Nothing changes.",
    }[scene.event]
    return says, (says.removesuffix("."),)


def _does_it(scene: ClipScene, rng: Random) -> Question:
    """Whether a shape moves, or anything does."""
    if scene.event == "still" or rng.random() < 0.3:
        text = rng.choice(("Does anything change?", "Is there any change?"))
        if scene.event == "still":
            return _say(text, "No, nothing changes.", ("no",), ("yes",))
        said, _ = _happens(scene)
        return _say(text, f"Yes, {said[0].lower()}{said[1:]}", ("yes",), ("no",))
    one = rng.choice(scene.actors)
    text = rng.choice((f"Does the {one.kind} move?", f"Is the {one.kind} moving?"))
    if scene.event == "move" and one is scene.actor:
        return _say(text, f"Yes, the {one.name} moves {scene.way}.", ("yes",), ("no",))
    return _say(text, f"No, the {one.kind} does not move.", ("no",), ("yes",))


def _color(scene: ClipScene, rng: Random) -> Question | None:
    if scene.paper_name and rng.random() < 0.1:
        answer = f"The background is {scene.paper_name}."
        return _say("What color is the background?", answer, (scene.paper_name,), others(NAMES, scene.paper_name))
    one = rng.choice(scene.actors)
    if one.later:
        return None
    word = rng.choice(("color", "colour"))
    text = rng.choice((f"What {word} is the {one.kind}?", f"Which {word} is the {one.kind}?"))
    return _say(text, f"The {one.kind} is {one.color}.", (one.color,), others(NAMES, one.color))


def _count(scene: ClipScene, rng: Random) -> Question:
    if scene.event in ("appear", "vanish"):
        return _counts(scene, rng, rng.random() < 0.7)
    noun = rng.choice(_NOUNS)
    text = rng.choice((f"How many shapes are in the {noun}?", "How many shapes are there?", "Count the shapes."))
    count = len(scene.actors)
    return _say(text, f"{counted(count, 'shape')}.", (str(count),), (OTHER_NUMBER,))


def _counts(scene: ClipScene, rng: Random, is_end: bool) -> Question:
    """How many shapes the first or the last frame has."""
    frame, when = (scene.frames - 1, "end") if is_end else (0, "start")
    count = sum(one.first <= frame <= one.last for one in scene.actors)
    which = "last" if is_end else "first"
    text = rng.choice((f"How many shapes are there at the {when}?", f"How many shapes are in the {which} frame?"))
    return _say(text, f"At the {when} there {_are(count)}.", (str(count),), (OTHER_NUMBER,))


def _are(count: int) -> str:
    return "is 1 shape" if count == 1 else f"are {count} {plural('shape')}"


def _is_there(scene: ClipScene, rng: Random) -> Question:
    noun, one = rng.choice(_NOUNS), rng.choice(scene.actors)
    if rng.random() < 0.5:
        text, answer = f"Is there {a(one.kind)} in the {noun}?", f"Yes, there is {a(one.kind)}."
        return _say(text, answer, ("yes",), ("no", "not"))
    kind = rng.choice([kind for kind in KINDS if all(kind != other.kind for other in scene.actors)])
    return _say(f"Is there {a(kind)} in the {noun}?", f"No, there is no {kind}.", ("no",), ("yes",))


def _other_names(scene: ClipScene) -> tuple[str, ...]:
    return tuple(other.name for other in scene.actors if other is not scene.actor)


_DIRECT: dict[str, Callable[[ClipScene, Random], None]] = {
    "move": ClipScene.move,
    "size": ClipScene.size,
    "appear": ClipScene.appear,
    "vanish": ClipScene.vanish,
    "recolor": ClipScene.recolor,
    "still": ClipScene.still,
}
_ASK_EVENT: dict[str, Callable[[ClipScene, Random], Question]] = {
    "move": _ask_move,
    "size": _ask_size,
    "appear": _ask_appear,
    "vanish": _ask_vanish,
    "recolor": _ask_recolor,
    "still": _ask_still,
}
