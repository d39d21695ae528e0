"""The highest rate of requests at which a server keeps to its service levels: open loops at rising rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from saccade.bench.report import Figures, Slo

_FACTOR = 1.5  # from one rate to the next, until one is too high
_DOWN = 3.0  # the same, downwards
_LOWEST = 250.0  # part of the first rate that is tried
_PRECISION = 0.05  # of the rate


class Trial(NamedTuple):
    rate: float
    figures: Figures
    is_kept: bool


def find_goodput(measure: Callable[[float], Figures], slo: Slo, first: float) -> list[Trial]:
    """All trials. Where the first rate is too high already, lower ones are tried."""
    trials: list[Trial] = []

    def trial(rate: float) -> bool:
        found = measure(rate)
        trials.append(Trial(rate, found, found.keeps(slo)))
        return trials[-1].is_kept

    low, high = 0.0, first
    while trial(high):
        low, high = high, high * _FACTOR
    if not low:
        low = first / _FACTOR
        while not trial(low):
            low, high = low / _DOWN, low
            if low < first / _LOWEST:
                return trials
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if trial(middle):
            low = middle
        else:
            high = middle
    return trials


def best(trials: list[Trial]) -> Trial | None:
    """The highest rate that was kept."""
    return max((trial for trial in trials if trial.is_kept), key=lambda trial: trial.rate, default=None)
