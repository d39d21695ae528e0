"""What changes while training runs, as functions of the time that has passed."""

from __future__ import annotations

import math

from training.samples import SKILLS

# Hard skills get more samples; colours and shapes come along in every scene of shapes.
BASE_WEIGHTS = {
    "color": 1.0,
    "shape": 1.0,
    "size": 1.2,
    "position": 2.5,
    "count": 2.5,
    "words": 5.0,
    "numbers": 2.5,
    "chart": 2.5,
    "table": 9.0,
    "several": 1.2,
    "absent": 1.0,
    "json": 0.8,
    "caption": 0.8,
    "chat": 0.4,
    "document": 3.0,  # these three have long answers: more tokens than their share of samples
    "extract": 2.5,
    "tool": 1.8,
    "refuse": 2.0,
    "compare": 2.0,
    "choice": 2.5,
    "video": 3.0,
}
_WARM_UP, _DECAY_FROM = 0.03, 0.5


def learning_rate(progress: float, peak: float) -> float:
    """Up, level, and down along a cosine; `progress` is the part of the time that has passed."""
    if progress < _WARM_UP:
        return peak * max(progress / _WARM_UP, 0.02)
    if progress < _DECAY_FROM:
        return peak
    rest = min(1.0, (progress - _DECAY_FROM) / (1 - _DECAY_FROM))
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * rest)))


def text_level(progress: float, is_resumed: bool) -> float:
    """How long texts to read may be: short ones first, all of them after a fifth of the time."""
    return 1.0 if is_resumed else min(1.0, 0.3 + 3.5 * progress)


def dense_weight(progress: float, is_resumed: bool) -> float:
    """High at first, as the heads start from nothing in every run that has only the weights of the last."""
    return 0.1 + (0.2 if is_resumed else 0.4) * max(0.0, 1 - progress / 0.6)


def skill_weights(accuracy: dict[str, float]) -> list[float]:
    """Much more of what is still wrong; a skill that is learned keeps a small share, not to be forgotten."""
    return [BASE_WEIGHTS[skill] * (0.4 + 2.5 * (1 - accuracy.get(skill, 0.5))) for skill in SKILLS]
