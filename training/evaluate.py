"""Accuracy per skill of anything that answers questions about pictures. Knows samples and scoring, not models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from PIL import Image

from training.samples import SKILLS, Sample, is_right

Answer = Callable[[Sequence[Image.Image], str], str]  # pictures and question to text

GOALS = {
    "color": 0.95,
    "shape": 0.95,
    "position": 0.95,
    "count": 0.90,
    "words": 0.85,
    "numbers": 0.85,
    "chart": 0.85,
    "table": 0.85,
}


@dataclass(slots=True)
class Score:
    """Of one skill."""

    right: int = 0
    total: int = 0
    wrong: list[tuple[Sample, str]] = field(default_factory=list)  # and what was answered instead

    @property
    def accuracy(self) -> float:
        return self.right / self.total if self.total else 0.0


def evaluate(samples: Iterable[Sample], answer: Answer) -> dict[str, Score]:
    """Ask the first question of each sample; scores by skill, in the order of SKILLS."""
    pairs = ((made, answer([p.image for p in made.pictures], made.questions[0].text)) for made in samples)
    return score(pairs)


def score(answered: Iterable[tuple[Sample, str]]) -> dict[str, Score]:
    """The same for answers that are there already, from a server that answers many at once."""
    scores = {skill: Score() for skill in SKILLS}
    for made, text in answered:
        mine = scores[made.skill]
        mine.total += 1
        if is_right(made.questions[0], text):
            mine.right += 1
        else:
            mine.wrong.append((made, text))
    return {skill: s for skill, s in scores.items() if s.total}


def table(scores: dict[str, Score]) -> str:
    """One line per skill, with its goal where it has one."""
    lines = [f"{'skill':<10} {'right':>6} {'of':>6} {'accuracy':>9}  goal"]
    for skill, s in scores.items():
        goal = f"{GOALS[skill]:.0%}" if skill in GOALS else ""
        lines.append(f"{skill:<10} {s.right:>6} {s.total:>6} {s.accuracy:>9.1%}  {goal}".rstrip())
    right, total = sum(s.right for s in scores.values()), sum(s.total for s in scores.values())
    lines.append(f"{'all':<10} {right:>6} {total:>6} {right / max(1, total):>9.1%}")
    return "\n".join(lines)
