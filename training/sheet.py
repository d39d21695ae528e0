"""The paper a scene is drawn on, and the interface every kind of scene has."""

from __future__ import annotations

from random import Random
from typing import NamedTuple, Protocol

from training.canvas import TOKEN
from training.samples import Picture, Question


class Sheet(NamedTuple):
    """Sizes of one picture, (width, height) in pixels."""

    size: tuple[int, int]  # what the image processor makes of it: multiples of TOKEN
    drawn: tuple[int, int]  # what is drawn; rounds to `size`

    @property
    def short(self) -> int:
        return min(self.drawn)


class Scene(Protocol):
    """Pictures that questions can be asked about."""

    pictures: tuple[Picture, ...]
    skills: tuple[str, ...]  # which skills questions here may be about

    def ask(self, rng: Random, skill: str) -> Question | None:
        """A question of that skill, or None where this scene has none with a clear answer."""
        ...


def sheet(rng: Random, columns: int, rows: int, odd: float = 0.35) -> Sheet:
    """A sheet of so many tokens; with probability `odd` it is drawn a little larger or smaller than its grid."""
    size = columns * TOKEN, rows * TOKEN
    if rng.random() >= odd:
        return Sheet(size, size)
    reach = TOKEN // 2 - 1  # further off it would round to another grid
    return Sheet(size, (size[0] + rng.randint(-reach, reach), size[1] + rng.randint(-reach, reach)))


def listed(parts: list[str], last: str = "and") -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def others(all_of_them: tuple[str, ...], *keys: str) -> tuple[str, ...]:
    """What a strict answer may not mention: the alternatives, less those that a key itself contains."""
    words = {word for key in keys for word in key.split()}
    return tuple(name for name in all_of_them if name not in words)
