"""Fits a calibration to measured times, so that plans for a machine are those of that machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.apps.plan.calibration import SHARES, Calibration
from saccade.apps.plan.timing import TimeModel

_FITTED = ("gemm", "tower", "bandwidth", "layer_us", "request_ms")  # rarer launches stay as they are
_SMALLEST = 0.01  # of all of them: less makes no difference
_ROUNDS = 200
_NUDGE = 1e-4  # of a logarithm, for derivatives

Floats = npt.NDArray[np.float64]


class Figure(NamedTuple):
    name: str
    seconds: float  # measured
    predict: Callable[[TimeModel], float]


def fit(timing: TimeModel, figures: Sequence[Figure]) -> Calibration:
    """Least squares of the logarithms (Levenberg-Marquardt), so that ratios count."""
    values = np.log([getattr(timing.calibration, name) for name in _FITTED])
    errors = _errors(timing, values, figures)
    damping = 1.0
    for _ in range(_ROUNDS):
        nudged = [_errors(timing, values + _NUDGE * row, figures) for row in np.eye(len(values))]
        slopes = (np.stack(nudged, axis=1) - errors[:, None]) / _NUDGE  # [figures, values]
        square = slopes.T @ slopes + damping * np.eye(len(values))
        moved = values - np.linalg.solve(square, slopes.T @ errors)
        new_errors = _errors(timing, moved, figures)
        if new_errors @ new_errors < errors @ errors:
            values, errors, damping = moved, new_errors, damping / 3
        else:
            damping *= 3
    return _calibration(timing.calibration, values)


def _errors(timing: TimeModel, values: Floats, figures: Sequence[Figure]) -> Floats:
    changed_timing = replace(timing, calibration=_calibration(timing.calibration, values))
    return np.array([math.log(figure.predict(changed_timing) / figure.seconds) for figure in figures])


def _calibration(base: Calibration, values: Floats) -> Calibration:
    changes: dict[str, Any] = {}
    for name, value in zip(_FITTED, np.exp(np.clip(values, -30, 30)), strict=True):
        highest = 1.0 if name in SHARES else math.inf
        changes[name] = min(max(float(value), _SMALLEST), highest)
    return replace(base, **changes)
