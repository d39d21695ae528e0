"""The highest rate of requests at which a server keeps to its service levels: open loops at rising rates.

closed loops of 8, 32, 128 clients    until throughput hardly grows: what the server can do
an open loop at 0.7 of that           then up while it keeps to the levels, or down until it does
between kept and missed               halves, until they are within 5 %
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from saccade.apps.bench.report import Figures, Slo

FIRST_SHARE = 0.7  # of the closed loops' requests/s: where the search begins
MAX_TRIALS = 12
MAX_SECONDS = 600.0  # after which no trial begins
_MORE_CLIENTS = 4  # times, from one closed loop to the next
_MAX_CLIENTS = 512
_GAIN = 1.2  # of throughput, else more clients are not tried
_WAVE_SECONDS = 10.0  # for one request of every client, else more clients are not tried
_FACTOR = 1.5  # from the first rate to the next; each further step is so much larger
_DOWN = 3.0  # downwards
_LOWEST = 250.0  # part of the first rate that is tried
_PRECISION = 0.05  # of the rate


class Trial(NamedTuple):
    rate: float
    figures: Figures
    is_kept: bool


def saturated(measure: Callable[[int], Figures], clients: int) -> float:
    """Requests/s of closed loops with more and more clients, while that helps."""
    best = 0.0
    while True:
        figures = measure(clients)
        gain = figures.requests_per_s / max(best, 1e-9)
        best = max(best, figures.requests_per_s)
        clients *= _MORE_CLIENTS
        if gain < _GAIN or figures.errors or clients > min(_MAX_CLIENTS, best * _WAVE_SECONDS):
            return best


class _Search:
    def __init__(
        self, measure: Callable[[float], Figures], slo: Slo, seconds: float, clock: Callable[[], float]
    ) -> None:
        self.trials: list[Trial] = []
        self._measure = measure
        self._slo = slo
        self._clock = clock
        self._end = clock() + seconds

    def is_over(self) -> bool:
        return len(self.trials) >= MAX_TRIALS or self._clock() >= self._end

    def keeps(self, rate: float) -> bool:
        figures = self._measure(rate)
        self.trials.append(Trial(rate, figures, figures.keeps(self._slo)))
        return self.trials[-1].is_kept

    def up(self, rate: float) -> tuple[float, float] | None:
        """A kept and a missed rate, above one that was kept."""
        factor = _FACTOR
        while not self.is_over():
            if not self.keeps(rate * factor):
                return rate, rate * factor
            rate *= factor
            factor *= _FACTOR
        return None

    def down(self, rate: float) -> tuple[float, float] | None:
        """The same, below a rate that was missed."""
        low = rate / _FACTOR
        lowest = rate / _LOWEST
        while low >= lowest and not self.is_over():
            if self.keeps(low):
                return low, rate
            rate = low
            low /= _DOWN
        return None

    def between(self, low: float, high: float) -> None:
        while high - low > _PRECISION * high and not self.is_over():
            middle = (low + high) / 2
            if self.keeps(middle):
                low = middle
            else:
                high = middle


def find_goodput(
    measure: Callable[[float], Figures],
    slo: Slo,
    first: float,
    seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> list[Trial]:
    """All trials. Where the first rate is too high already, lower ones are tried."""
    search = _Search(measure, slo, seconds, clock)
    ends = search.up(first) if search.keeps(first) else search.down(first)
    if ends is not None:
        search.between(*ends)
    return search.trials


def best(trials: list[Trial]) -> Trial | None:
    """The highest rate that was kept."""
    return max((trial for trial in trials if trial.is_kept), key=lambda trial: trial.rate, default=None)


def summary(trials: list[Trial], slo: Slo) -> str:
    """The goodput, and how far the search came."""
    rate = max((trial.rate for trial in trials if trial.is_kept), default=0.0)
    words = f"goodput: {rate:.2f} requests/s within {slo.ttft_ms:g} and {slo.itl_ms:g} ms at p99"
    missed = [trial.rate for trial in trials if not trial.is_kept and trial.rate > rate]
    if not missed:
        return f"{words}; the search ended before a rate was missed, so the limit is higher"
    lowest = min(missed)
    if rate and lowest - rate > _PRECISION * lowest:
        return f"{words}; the search ended early: the limit is below {lowest:.2f}"
    return words
