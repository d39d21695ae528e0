"""Scenes of several pictures that are compared: which has more, which total is larger, what differs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from training.canvas import KINDS, Canvas
from training.charts import LETTER_SIZES
from training.fonts import Font, font, font_names
from training.palette import COLORS, NAMES, background, ink, is_clear
from training.reading import TextScene
from training.samples import Picture, Question
from training.several import ORDINALS
from training.shape_questions import a, plural
from training.shapes import Shape, ShapeScene
from training.sheet import Scene, Sheet, listed, others
from training.words import labels

_ABOUT = (
    *("count", "count", "count", "number", "number", "total", "total", "same", "same", "word"),
    *("differs", "differs", "differs"),
)
_SMALLEST_LETTERS = 11
_DIFFERENCE = (
    *("What differs?", "What is different?", "What is the difference?", "What has changed?", "Find the difference."),
    *("Compare the pictures.", "What is the difference between the pictures?"),
)


class BillScene:
    """A short bill: a few lines with prices, and their total."""

    skills: tuple[str, ...] = ()

    def __init__(self, rng: Random, sheet: Sheet, total: int, *, has_cents: bool = False) -> None:
        """`total` is in cents where prices have cents."""
        self.total = total
        face = _fitting_face(rng, sheet.drawn[0], f"TOTAL {_price(total, has_cents)}")
        line = sum(face.getmetrics()) + 2
        most = max(0, min(3, sheet.drawn[1] // line - 1, total - 1))
        items = rng.randint(min(1, most), most)
        paper, _ = background(rng, [])
        color, _ = ink(rng, paper)
        canvas = Canvas(sheet.size, sheet.drawn, paper)
        parts = _parts(rng, total, items)
        rows = [*zip(labels(rng, items, 5), parts, strict=True)] if items else []
        top = rng.randint(0, max(0, canvas.height - line * (len(rows) + 1)))
        for index, (name, price) in enumerate([*rows, (rng.choice(("Total", "TOTAL")), total)]):
            shown = _price(price, has_cents)
            canvas.text((4, top + line * index), name, face, color)
            canvas.text((canvas.width - 4 - int(face.getlength(shown)), top + line * index), shown, face, color)
        self.pictures: tuple[Picture, ...] = (canvas.finish(rng),)

    def ask(self, rng: Random, skill: str) -> Question | None:
        return None


class CompareScene:
    skills: tuple[str, ...] = ("compare",)

    def __init__(self, rng: Random, sheets: list[Sheet], level: float = 1.0) -> None:
        self.about = rng.choice(_ABOUT)
        if self.about == "differs":
            sheets = [sheets[0]] * 2
        self.scenes = _pair(rng, sheets[0]) if self.about == "differs" else self._made(rng, sheets, level)
        self.pictures: tuple[Picture, ...] = tuple(p for scene in self.scenes for p in scene.pictures)

    def _made(self, rng: Random, sheets: list[Sheet], level: float) -> list[Scene]:
        if self.about == "total":
            if rng.random() < 0.6:
                most = rng.choice((999, 9999, 9999, 99999))
                return [BillScene(rng, sheet, rng.randint(50, most), has_cents=True) for sheet in sheets]
            return [BillScene(rng, sheet, rng.randint(2, rng.choice((20, 99, 999)))) for sheet in sheets]
        if self.about in ("number", "word"):
            skill = "numbers" if self.about == "number" else "words"
            made: list[Scene] = [TextScene(rng, sheet, skill, level, most=1) for sheet in sheets]
            is_same = self.about == "word" and rng.random() < 0.3
            return made[:1] * len(made) if is_same else made
        if self.about == "count":
            return [ShapeScene(rng, sheet, "count") for sheet in sheets]
        return _alike(rng, sheets)

    def ask(self, rng: Random, skill: str) -> Question | None:
        if self.about == "differs":
            return self._differs(rng)
        if self.about == "count":
            return self._more(rng) if rng.random() < 0.8 else self._which_has(rng)
        if self.about in ("number", "total"):
            return self._larger(rng)
        return self._same_word(rng) if self.about == "word" else self._same(rng)

    # --- which one ---

    def _more(self, rng: Random) -> Question | None:
        shapes = [shape for scene in self._shapes() for shape in scene.shapes]
        shape, kind = rng.choice(shapes), rng.random()
        noun, named = (
            ("shape", {})
            if kind < 0.4
            else (shape.kind, {"kind": shape.kind})
            if kind < 0.8
            else (f"{shape.color} shape", {"color": shape.color})
        )
        counts = [len(scene.having(**named)) for scene in self._shapes()]
        is_two, is_most = len(counts) == 2, rng.random() < 0.7
        word = ("more" if is_two else "the most") if is_most else ("fewer" if is_two else "the fewest")
        if is_two and counts[0] == counts[1] and rng.random() < 0.5:
            text = f"Which {_noun(rng)} has {word} {plural(noun)}?"
            return _compared(text, f"Both have the same number of {plural(noun)}.", ("both",))
        return _best(rng, counts, is_most, f"has {word} {plural(noun)}")

    def _larger(self, rng: Random) -> Question | None:
        thing = "total" if self.about == "total" else "number"
        values = [
            scene.total if isinstance(scene, BillScene) else int(scene.texts[0])
            for scene in self.scenes
            if isinstance(scene, (BillScene, TextScene))
        ]
        is_most, is_two = rng.random() < 0.6, len(values) == 2
        more = rng.choice(("larger", "higher") if is_two else ("largest", "highest"))
        less = rng.choice(("smaller", "lower") if is_two else ("smallest", "lowest"))
        nouns = ("receipt", "bill", "picture") if thing == "total" else ("picture", "image")
        return _best(rng, values, is_most, f"has the {more if is_most else less} {thing}", rng.choice(nouns))

    def _which_has(self, rng: Random) -> Question | None:
        shape = rng.choice([shape for scene in self._shapes() for shape in scene.shapes])
        has = [int(bool(scene.having(shape.kind, shape.color))) for scene in self._shapes()]
        return _best(rng, has, True, f"has {a(shape.name)}")

    # --- alike or not ---

    def _same(self, rng: Random) -> Question:
        """About pictures of one shape each."""
        ones = [scene.shapes[0] for scene in self._shapes()]
        is_color = rng.random() < 0.6
        names = [one.color if is_color else a(one.kind) for one in ones]
        every, what, verb = (
            "both" if len(ones) == 2 else "all",
            "color" if is_color else "shape",
            "are" if is_color else "show",
        )
        first = f"Are {every} shapes the same color?" if is_color else f"Do {every} pictures show the same shape?"
        text = rng.choice(
            (first, f"Is the {what} the same in {every} pictures?", f"Do the pictures have the same {what}?")
        )
        if len(set(names)) == 1:
            return _compared(text, f"Yes, {every} {verb} {names[0]}.", ("yes",), ("no",))
        return _compared(text, f"No, they {verb} {listed(list(dict.fromkeys(names)))}.", ("no",), ("yes",))

    def _same_word(self, rng: Random) -> Question:
        texts = [scene.texts[0] for scene in self.scenes if isinstance(scene, TextScene)]
        if rng.random() < 0.5:
            lengths = [len(text) for text in texts]
            made = _best(rng, lengths, True, "has the longer word" if len(texts) == 2 else "has the longest word")
            if made is not None:
                return made
        text = rng.choice(("Do the pictures say the same?", "Is it the same word?", "Do they show the same word?"))
        if len(set(texts)) == 1:
            return _compared(text, f'Yes, all say "{texts[0]}".', ("yes",), ("no",))
        said = listed([f'"{word}"' for word in dict.fromkeys(texts)])
        return _compared(text, f"No, they say {said}.", ("no",), ("yes",))

    def _differs(self, rng: Random) -> Question:
        one, two = self._shapes()
        if rng.random() < 0.2:
            return self._is_same(rng, one.shapes == two.shapes)
        text = rng.choice(_DIFFERENCE)
        gone, new = _without(one.shapes, two.shapes), _without(two.shapes, one.shapes)
        if not gone and not new:
            return _compared(text, "Nothing differs.", ("nothing",))
        if not new:
            return _compared(
                text, f"The second picture has no {gone[0].name}.", (f"second picture has no {gone[0].name}",)
            )
        if not gone:
            return _compared(text, f"The first picture has no {new[0].name}.", (f"first picture has no {new[0].name}",))
        before, after = gone[0], new[0]
        if before.kind == after.kind:
            answer = f"The {before.kind} is {before.color} in the first picture and {after.color} in the second."
        else:
            answer = f"The {before.name} is {a(after.kind)} in the second picture."
        return _compared(text, answer, (answer.removesuffix("."),))

    def _is_same(self, rng: Random, is_same: bool) -> Question:
        text = rng.choice(("Are these the same?", "Are the pictures the same?", "Is it the same picture twice?"))
        if is_same:
            return _compared(text, "Yes, they are the same.", ("yes",), ("no",))
        return _compared(text, "No, they differ.", ("no",), ("yes",))

    def _shapes(self) -> list[ShapeScene]:
        return [scene for scene in self.scenes if isinstance(scene, ShapeScene)]


def _compared(text: str, answer: str, keys: tuple[str, ...], forbidden: tuple[str, ...] = ()) -> Question:
    return Question("compare", text, answer, keys, forbidden)


def _noun(rng: Random) -> str:
    return rng.choice(("picture", "image"))


def _best(rng: Random, values: list[int], is_most: bool, says: str, noun: str = "") -> Question | None:
    best = max(values) if is_most else min(values)
    if values.count(best) > 1:
        return None
    noun, key = noun or _noun(rng), ORDINALS[values.index(best)]
    text = rng.choice((f"Which {noun} {says}?", f"Which of the {noun}s {says}?"))
    return _compared(text, f"The {key} {noun} {says}.", (key,), others(ORDINALS, key))


def _price(value: int, has_cents: bool) -> str:
    return f"{value // 100}.{value % 100:02}" if has_cents else str(value)


def _fitting_face(rng: Random, width: int, widest: str) -> Font:
    """A font of any size in which this text fits the width, or the smallest one."""
    name = rng.choice(font_names())
    for size in range(rng.randint(*LETTER_SIZES), _SMALLEST_LETTERS, -1):
        if font(name, size).getlength(widest) <= width - 8:
            return font(name, size)
    return font(name, _SMALLEST_LETTERS)


def _parts(rng: Random, total: int, count: int) -> list[int]:
    """`count` prices that add up to `total`."""
    if not count:
        return []
    cuts = sorted(rng.sample(range(1, total), count - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


def _alike(rng: Random, sheets: list[Sheet]) -> list[Scene]:
    """One shape in each picture; often of one kind or of one colour."""
    kind, color = rng.choice(KINDS), rng.choice(NAMES)
    is_same_kind, is_same_color = rng.random() < 0.5, rng.random() < 0.5
    made: list[Scene] = []
    for sheet in sheets:
        own = (kind if is_same_kind else rng.choice(KINDS), color if is_same_color else rng.choice(NAMES))
        made.append(ShapeScene(rng, sheet, "compare", most=1, palette=[own]))
    return made


def _pair(rng: Random, sheet: Sheet) -> list[Scene]:
    """A picture, and the same again with one change or none."""
    first = ShapeScene(rng, sheet, "compare", most=4)
    while len(first.unique()) < len(first.shapes):
        first = ShapeScene(rng, sheet, "compare", most=4)
    shapes, kind = list(first.shapes), rng.random()
    at = rng.randrange(len(shapes))
    old = shapes[at]
    clear = [name for name in NAMES if is_clear(COLORS[name], first.paper) and not first.having(color=name)]
    if kind < 0.35 and clear:
        shapes[at] = replace(old, color=rng.choice(clear))
    elif kind < 0.5:
        shapes[at] = replace(old, kind=rng.choice(others(KINDS, *(s.kind for s in shapes))))
    elif kind < 0.75 and len(shapes) > 1:
        shapes.pop(at)
    pair: list[Scene] = [first.redrawn(rng, first.shapes), first.redrawn(rng, shapes)]
    rng.shuffle(pair)
    return pair


def _without(shapes: list[Shape], others_of_them: list[Shape]) -> list[Shape]:
    return [shape for shape in shapes if shape not in others_of_them]
