"""Times the parts of a step at start, so that the scheduler knows what fits into one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from saccade.checkpoint.config import ModelConfig
from saccade.models.interface import VisionLanguageModel
from saccade.models.vision.blocks import vision_config
from saccade.runner.encoder.graph_capture import blank_patches
from saccade.types.latency import LatencyCurve
from saccade.types.media import Grid

_REPEATS = 3
_LONG_MS = 100.0
_SLOTS = (64, 256, 512, 1024, 1536, 2304, 4096, 8192)
_COMMON = range(512, 4097, 128)  # embeddings of common image sizes

Trials = Iterable[tuple[int, Callable[[], object]]]
"""Each size with a function that runs it."""


def timed_curve(trials: Trials) -> LatencyCurve:
    return _rising((size, timed(run)) for size, run in trials)


class TowerTimes(NamedTuple):
    layers: int  # in which it can be cut; it may leave its last ones out
    layer_ms: LatencyCurve  # of one, by embeddings, up to the most expensive image that is admitted


def tower_times(model: VisionLanguageModel, largest: Grid | None) -> TowerTimes:
    if largest is None:
        return TowerTimes(0, ())
    _load_kernels(model, largest)
    grids = list(_grids(model.config, largest))
    layers = _encode(model, grids[0])
    times = [timed(partial(_encode, model, grid)) / layers for grid in grids]
    slots = [grid.patches // _merged(model.config) for grid in grids]
    return TowerTimes(layers, _rising(zip(slots, times, strict=True)))


@torch.inference_mode()
def seconds_per_layer(model: VisionLanguageModel, grid: Grid) -> float:
    """One layer of the vision tower over an image of this grid, on a CPU: the whole tower is not run."""
    encoding = model.encode(blank_patches(model, [grid]), [grid])
    marks = [time.perf_counter() for _ in islice(encoding, 1 + _REPEATS)]  # set-up comes before the first
    encoding.close()
    return min((end - start for start, end in pairwise(marks)), default=0.0)


def encode_seconds(model: VisionLanguageModel, grid: Grid) -> float:
    """The whole tower over an image of this grid."""
    with torch.inference_mode():
        if blank_patches(model, [grid]).is_cuda:
            return timed(partial(_encode, model, grid)) / 1e3
        if seconds := seconds_per_layer(model, grid) * vision_config(model.config).num_layers:
            return seconds
        start = time.perf_counter()  # it cannot be interrupted between layers
        _encode(model, grid)
        return time.perf_counter() - start


def largest_within(config: ModelConfig, largest: Grid, patches: int) -> Grid:
    """The grid of the largest image that has at most so many patches, or the smallest there is."""
    fitting = [grid for grid in _grids(config, largest) if grid.patches <= patches]
    return max(fitting, key=lambda grid: grid.patches, default=largest)


def timed(run: Callable[[], object]) -> float:
    """Milliseconds on the device, the best of a few. Launched back to back, as steps are.

    The first lap warms up. Of a long pass one more is enough: what others add is little beside it.
    """
    first = _laps(run, 1)
    if first > _LONG_MS:
        return min(first, _laps(run, 1))
    return _laps(run, _REPEATS)


def _laps(run: Callable[[], object], count: int) -> float:
    laps = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        laps.append((start, end))
    laps[-1][1].synchronize()
    return min(float(start.elapsed_time(end)) for start, end in laps)


def _load_kernels(model: VisionLanguageModel, largest: Grid) -> None:
    """Run many sizes: libraries may load another kernel for each, which takes as long as several steps."""
    for slots in _COMMON:
        grid = _square(model.config, slots)
        if grid.patches < largest.patches and _takes_any_size(model.config):
            _encode(model, grid)


def _encode(model: VisionLanguageModel, grid: Grid) -> int:
    """Returns the number of layers that ran."""
    return sum(model.encode(blank_patches(model, [grid]), [grid]))


def _grids(config: ModelConfig, largest: Grid) -> Iterator[Grid]:
    """Squares of several sizes up to the largest; with learned positions one size, or fewer tiles of it."""
    if vision_config(config).takes_squares:
        yield from (Grid(tiles, largest.h, largest.w) for tiles in range(1, largest.t))
    elif _takes_any_size(config):
        yield from (_square(config, slots) for slots in _SLOTS if slots * _merged(config) < largest.patches)
    yield largest


def _takes_any_size(config: ModelConfig) -> bool:
    return not vision_config(config).takes_squares and _merged(config) > 1


def _square(config: ModelConfig, slots: int) -> Grid:
    """The largest square with at most so many embeddings."""
    side = math.isqrt(slots) * math.isqrt(_merged(config))
    return Grid(1, side, side)


def _merged(config: ModelConfig) -> int:
    """Patches per embedding."""
    return vision_config(config).spatial_merge_size ** 2


def _rising(points: Iterable[tuple[int, float]]) -> LatencyCurve:
    """Lower each time to that of the next larger size: other users of the device only add time.

    Otherwise a burst while one size is measured would bound steps for good.
    """
    curve: list[tuple[int, float]] = []
    for size, ms in sorted(points, reverse=True):
        curve.append((size, min(ms, curve[-1][1] if curve else ms)))
    return tuple(reversed(curve))
