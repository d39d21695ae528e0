"""What is run and timed at the start, before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import LLM
from saccade.runner import latency_profile
from saccade.types.media import Grid
from tests.helpers.families.families import FAMILIES

pytestmark = pytest.mark.transformers


class Tower:
    """Notes the grids that went through it."""

    def __init__(self, *, takes_squares: bool = False) -> None:
        vision = SimpleNamespace(takes_squares=takes_squares, spatial_merge_size=2, patch_dim=3 * 2 * 14**2)
        self.config: Any = SimpleNamespace(vision=vision)
        self.decoder: Any = SimpleNamespace(table=torch.zeros(1))
        self.ran: list[Grid] = []

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Iterator[int]:
        assert len(patches) == sum(grid.patches for grid in grids)
        self.ran.extend(grids)
        yield 4


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_profile, "timed", lambda run: run() and 8.0)


def test_images_of_common_sizes_go_through_the_tower_before_the_first_is_timed() -> None:
    tower = Tower()
    curve = latency_profile.tower_times(tower, Grid(1, 96, 96)).layer_ms  # type: ignore[arg-type]
    slots = [grid.patches // 4 for grid in tower.ran]
    before = slots[: -len(curve) - 1]  # the smallest runs once more, to count its layers
    assert before == sorted(set(before)) and before[0] == 22 * 22 and len(before) > 10
    assert max(slots) == 48 * 48, "nothing larger than the largest picture that is let in"
    assert [size for size, _ in curve] == slots[-len(curve) :] and {ms for _, ms in curve} == {2.0}


def test_a_burst_of_other_work_while_one_size_is_measured_bounds_no_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([40.0, 2.0, 3.0, 50.0, 5.0])
    monkeypatch.setattr(latency_profile, "timed", lambda run: next(took))
    curve = latency_profile.timed_curve((size, lambda: None) for size in (32, 64, 128, 256, 512))
    assert curve == ((32, 2.0), (64, 2.0), (128, 3.0), (256, 5.0), (512, 5.0))


def test_a_tower_that_knows_one_size_is_run_at_that_size_alone() -> None:
    tower = Tower(takes_squares=True)
    latency_profile.tower_times(tower, Grid(3, 24, 24))  # type: ignore[arg-type]
    assert set(tower.ran) == {Grid(1, 24, 24), Grid(2, 24, 24), Grid(3, 24, 24)}


@pytest.mark.parametrize("name", ["deepseek_vl_v2", "llava_next", "llava_onevision", "minicpmv"])
def test_the_most_expensive_image_can_be_rehearsed_where_images_have_tiles(name: str, tmp_path: Path) -> None:
    """On a GPU, kernels would read behind a picture that has fewer tiles than its grid says."""
    folder = FAMILIES[name].build(tmp_path)
    llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=2048, kv_cache_gb=0.05, use_tqdm=False)
    largest = llm.engine.processor.largest_item()
    assert largest is not None and largest.tiling is not None
    llm.engine.core.runner.warm_up(largest)
    assert largest.grid.t == 1 + largest.tiling.columns * largest.tiling.rows
    llm.close()
