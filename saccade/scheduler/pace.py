"""How much may happen in a step beside running answers, so that their next tokens come in time. Plain arithmetic.

a step     | decode of the running ones | prompts, or encoder layers |
           |<------ alone ------------->|<--------- spare ---------->|      alone + spare = target
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from saccade.types import Curve, Pace

SLOWDOWN = 2.25  # of running answers beside other work, where no target is set
_LEAST_SPARE = 0.25  # of what the answers take alone: whatever the target, prompts and pictures move on
_FEWEST_TOKENS = 32


class Share(NamedTuple):
    """What fits into a step beside its decodes: one or the other."""

    prompt_tokens: int
    encode_layers: int


def share(pace: Pace, num_decoding: int, work_in_flight: int) -> Share:
    """Prompts or pictures get all of the spare time; where both want it, they take turns."""
    alone = milliseconds(pace.decode_ms, num_decoding)
    target = pace.target_ms if pace.target_ms is not None else SLOWDOWN * alone
    spare = max(target - alone, _LEAST_SPARE * alone)
    is_encoding = work_in_flight > 0 and bool(pace.layer_ms)
    layers = max(1, int(spare / milliseconds(pace.layer_ms, work_in_flight))) if is_encoding else 1
    return Share(max(_FEWEST_TOKENS, size_within(pace.prompt_ms, spare)), layers)


def milliseconds(curve: Curve, size: int) -> float:
    """At any size: straight lines between the measured ones, in proportion beyond the last, flat before the first."""
    index = bisect_left(curve, (size, 0.0))
    if index == 0:
        return curve[0][1]
    if index == len(curve):
        return curve[-1][1] * size / curve[-1][0]
    (low, low_ms), (high, high_ms) = curve[index - 1], curve[index]
    return low_ms + (high_ms - low_ms) * (size - low) / (high - low)


def size_within(curve: Curve, limit_ms: float) -> int:
    """The largest measured size that takes no longer; 0 if none does."""
    return max((size for size, ms in curve if ms <= limit_ms), default=0)
