"""Questions with the answer among them: yes or no, this or that, A, B or C. Made from questions of other skills."""

from __future__ import annotations

import string
from collections.abc import Sequence
from random import Random

from saccade.apps.evaluation.scoring import OTHER_NUMBER, OTHER_QUOTE
from training.canvas import KINDS
from training.claims import draw_claim
from training.palette import NAMES
from training.samples import Picture, Question
from training.shape_questions import a
from training.shapes import ShapeScene
from training.sheet import Scene
from training.words import number, word

ABOUT = ("color", "shape", "count", "position", "size", "words", "numbers", "chart", "table")
_LETTER = (
    *("Answer with the letter.", "Answer with the letter only.", "Which one is right?", "Choose one.", ""),
    "Answer with the option's letter from the given choices directly.",
    "Answer with A, B or C.",  # the last: where there are three
)
_NUMBER = ("Answer with the number.", "Answer with the number only.", "Which one is right?", "Choose one.", "")
_YES_NO = ("Answer yes or no.", "Yes or no?", "Please answer yes or no.", "Answer with yes or no only.")


class ChoiceScene:
    """Another scene, whose questions are asked with choices."""

    skills: tuple[str, ...] = ("choice",)

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._about = [skill for skill in scene.skills if skill in ABOUT]
        self.pictures: tuple[Picture, ...] = scene.pictures

    def ask(self, rng: Random, skill: str) -> Question | None:
        if isinstance(self._scene, ShapeScene) and rng.random() < 0.3:
            return _claimed(rng, self._scene)
        asked = self._scene.ask(rng, rng.choice(self._about))
        if asked is None or len(asked.keys) != 1:
            return None
        if asked.keys[0] in ("yes", "no"):
            return _yes_or_no(rng, asked.text, asked.keys[0] == "yes")
        wrong = _wrong(rng, asked)
        if not wrong:
            return None
        if rng.random() < 0.35:
            is_right = rng.random() < 0.5
            shown = asked.keys[0] if is_right else wrong[0]
            thing = a(shown) if shown in KINDS else _quoted(asked, shown)
            return _yes_or_no(rng, f"{asked.text} Is it {thing}?", is_right)
        return _lettered(rng, asked, wrong[: rng.choice((1, 2, 2, 3))])


def _claimed(rng: Random, scene: ShapeScene) -> Question | None:
    claim = draw_claim(rng, scene)
    if claim is None:
        return None
    if rng.random() < 0.6:
        is_closed = not claim.is_short or rng.random() < 0.5
        return _yes_or_no(rng, claim.question, claim.is_true, closing=None if is_closed else "")
    text = rng.choice((f"Is it true that {claim.said}?", f"True or false: {claim.said}. Is it true?"))
    return _yes_or_no(rng, text, claim.is_true, closing=rng.choice(("", rng.choice(_YES_NO))))


def _yes_or_no(rng: Random, text: str, is_yes: bool, closing: str | None = None) -> Question:
    """`closing` says how to answer; without one it is drawn."""
    closing = rng.choice(_YES_NO) if closing is None else closing
    return Question(
        "choice",
        f"{text} {closing}".rstrip(),
        "Yes." if is_yes else "No.",
        ("yes" if is_yes else "no",),
        ("no" if is_yes else "yes",),
    )


def _lettered(rng: Random, asked: Question, wrong: Sequence[str]) -> Question:
    """The options, each behind a letter or a number, in one of the usual layouts; the answer is that sign alone."""
    options = [asked.keys[0], *wrong]
    rng.shuffle(options)
    mark, is_listed = rng.choice((".", ")", ":")), rng.random() < 0.7
    is_numbered = not asked.keys[0].isdigit() and rng.random() < 0.25
    letters = (string.digits[1:] if is_numbered else string.ascii_uppercase)[: len(options)]
    shown = [f"{letter}{mark} {_quoted(asked, option)}" for letter, option in zip(letters, options, strict=True)]
    closing = rng.choice(_NUMBER if is_numbered else _LETTER if len(options) == 3 else _LETTER[:-1])
    parts = [asked.text, *shown, closing] if is_listed else [f"{asked.text} {', '.join(shown)}.", closing]
    text = ("\n" if is_listed else " ").join(parts).rstrip()
    right = letters[options.index(asked.keys[0])]
    return Question("choice", text, right, (right,), tuple(letter for letter in letters if letter != right))


def _quoted(asked: Question, option: str) -> str:
    return f'"{option}"' if asked.skill == "words" else option


def _wrong(rng: Random, asked: Question) -> list[str]:
    """Options that look as likely as the answer, three at most."""
    right = asked.keys[0]
    if asked.skill in ("words", "numbers"):
        return _misread(rng, right)
    if right.isdigit():
        near = [int(right) + step for step in (-3, -2, -1, 1, 2, 3, 10) if int(right) + step >= 0]
        return [str(value) for value in rng.sample(near, 3)]
    if right in NAMES or right in KINDS:
        options = [name for name in (NAMES if right in NAMES else KINDS) if name != right]
    else:
        options = [name for name in asked.forbidden if name not in (OTHER_NUMBER, OTHER_QUOTE)]
    rng.shuffle(options)
    return options[:3]


def _misread(rng: Random, right: str) -> list[str]:
    """Texts of the same kind, some of them but a letter apart."""
    wrong: list[str] = []
    while len(wrong) < 3:
        if rng.random() < 0.5:
            other = number(rng, 6) if right.isdigit() else word(rng, 8)
        else:
            at = rng.randrange(len(right))
            pool = string.digits if right.isdigit() else string.ascii_lowercase
            other = right[:at] + rng.choice(pool) + right[at + 1 :]
            other = other.upper() if right.isupper() else other
        if other.lower() != right.lower() and other not in wrong:
            wrong.append(other)
    return wrong
