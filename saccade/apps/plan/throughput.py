"""A GPU under load: how many requests a second it sustains, what limits it, how long a first token waits.

With `work` seconds of encoding and prefill for a request, `steps` tokens after its first, B that decode:

    between tokens   decode(B) / (1 - rate * work)
    B                rate * steps * between tokens
    wait             of an M/D/1 queue over `work`, in the share of a step that pacing leaves it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from saccade.scheduler.latency_model import CEILING_MS, SLOWDOWN

_ROUNDS = 50  # of a fixed point and of a bisection
_SETTLED = 1e-9  # share by which a round may still change the number that runs
_MAX_DECAY = 30.0  # of the tail of a queue: that of one which is nearly always empty
_WORTH = 1.1  # times the requests/s by twice the memory, for which memory is what limits them
MAX_LOAD = 0.9  # of what saturates a GPU, where no service level says how much


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """What a request asks of the parts of a server, in seconds."""

    encode: float  # of the GPU, images that are cached left out
    prefill: float  # of the GPU, in steps that are full
    host: float  # of all threads that decode images
    first: float  # to the first token of a new request on an idle server
    steps: int  # tokens after the first
    decode: Callable[[float], float]  # seconds of a step, by requests
    max_running: int
    memory: str  # what limits those

    @property
    def work(self) -> float:
        return self.encode + self.prefill


class GpuLoad(NamedTuple):
    running: float  # requests that decode
    between: float  # seconds between two tokens
    wait: float  # seconds for the first token, on average
    wait_p99: float


class Level(NamedTuple):
    """Service level in seconds, of the first token at p99 and of the mean between tokens."""

    first: float = math.inf
    between: float = math.inf


def load_at(demand: RequestDemand, rate: float) -> GpuLoad | None:
    """None if the GPU cannot sustain the rate."""
    spare = 1 - rate * demand.work
    if spare <= 0:
        return None
    running = 0.0
    for _ in range(_ROUNDS):
        before = running
        running = rate * demand.steps * demand.decode(max(running, 1.0)) / spare
        if running > demand.max_running:
            return None
        if running - before <= _SETTLED * running:
            break
    step = demand.decode(max(running, 1.0)) if demand.steps else 0.0
    share = 1 - min(running, 1.0) * step / max(SLOWDOWN * step, CEILING_MS / 1e3)
    service = demand.work / share
    busy = rate * service
    if busy >= 1:
        return None
    mean = busy * service / (2 * (1 - busy))
    return GpuLoad(running, step / spare, mean, max(mean, _p99(busy) * service))


def _p99(busy: float) -> float:
    """The p99 wait of an M/D/1 queue, in services: its tail is P(wait > t) = c * exp(-d * t)."""
    low = 0.0
    high = _MAX_DECAY
    for _ in range(_ROUNDS):
        decay = (low + high) / 2
        if busy * math.expm1(decay) < decay:
            low = decay
        else:
            high = decay
    factor = (1 - busy) / (busy * math.exp(high) - 1) if busy else 0.0
    return max(0.0, math.log(max(100 * factor, 1.0)) / high)


def sustained(demand: RequestDemand, level: Level = Level()) -> tuple[float, str]:  # noqa: B008 (immutable)
    """The highest rate within the service level, and what breaks beyond it."""
    low = 0.0
    high = 2 / max(demand.work, demand.host, 1e-9)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _broken(demand, level, middle) is None:
            low = middle
        else:
            high = middle
    return low, _broken(demand, level, high) or ""


def _broken(demand: RequestDemand, level: Level, rate: float) -> str | None:
    """What a rate breaks first; None: nothing."""
    if rate * demand.host > 1:
        return "image decoding on the host"
    load = load_at(demand, rate)
    if load is None:
        return _limit(demand)
    if demand.first + load.wait_p99 > level.first:
        return "first-token service level"
    if demand.steps and load.between > level.between:
        return "between-tokens service level"
    return None


def _limit(demand: RequestDemand) -> str:
    """Memory, if more requests at once would help; else the largest part of the GPU's time."""
    running = demand.max_running
    if running < 1 or _rate(demand, 2 * running) > _WORTH * _rate(demand, running):
        return demand.memory
    decode = demand.steps * demand.decode(running) / running
    parts = {"encode": demand.encode, "prefill": demand.prefill, "decode": decode}
    return max(parts, key=lambda name: parts[name])


def _rate(demand: RequestDemand, running: int) -> float:
    return running / (demand.steps * demand.decode(running) + running * demand.work)
