from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from saccade.apps.plan.calibration import calibration_for
from saccade.apps.plan.fit import Figure, fit
from saccade.apps.plan.hardware import find_hardware
from saccade.apps.plan.model_cards import read_card
from saccade.apps.plan.timing import Precision, TimeModel
from saccade.apps.plan.workload import Workload, request_cost
from tests.helpers.engine.plans import deployment

CARD = read_card("Qwen/Qwen2-VL-2B")
PREDICT = {
    "decode of 1": lambda made: made.decode(1, 1000),
    "decode of 32": lambda made: made.decode(32, 1000),
    "text of 64": lambda made: made.prefill(64) + made.request,
    "text of 1600": lambda made: made.prefill(1600) + made.request,
    "image": lambda made: made.encode(IMAGE) + made.prefill(1200) + made.request,
}
IMAGE = request_cost(CARD, deployment().options, Workload()).images[0].geometry
HARDWARE = find_hardware("a100-80")
START = TimeModel(CARD.config, "bfloat16", HARDWARE, calibration_for(HARDWARE), Precision(2, 2))


def test_a_calibration_is_found_again_from_the_times_that_it_gives() -> None:
    true = replace(START.calibration, gemm=0.4, tower=0.3, bandwidth=0.7, layer_us=30.0, request_ms=4.0)
    measured = replace(START, calibration=true)
    found = fit(START, [Figure(name, predict(measured), predict) for name, predict in PREDICT.items()])
    for name in ("gemm", "tower", "bandwidth", "layer_us", "request_ms"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1), name


def test_a_machine_faster_than_its_peaks_is_taken_at_its_peaks() -> None:
    found = fit(START, [Figure(name, predict(START) / 100, predict) for name, predict in PREDICT.items()])
    assert found.gemm == found.tower == found.bandwidth == 1.0
    assert all(value > 0 for value in asdict(found).values() if not isinstance(value, str))
