"""Products that end with their activation: what is chosen, which tile is whose, what layers hand over.

The kernel itself needs the device: `linear_act` tries it there at start, `benchmarks.kernels` compares it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm import hopper_mainloop
from saccade.kernels.gemm.hopper_act import suits
from saccade.kernels.gemm.hopper_mainloop import num_tiles, num_whole
from saccade.kernels.gemm.linear_act import linear_act
from saccade.kernels.ops import reference
from saccade.models.cuda import gemm_table, gemms, vision
from saccade.models.cuda.residual import Residual
from saccade.models.cuda.vision import FusedVision
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.models.layers import activation
from saccade.models.vision.backend import TorchVision
from tests.helpers.families.decoder_layers import decoder, plain_mlp, rows_of, total
from tests.helpers.families.vision_towers import GRIDS, QWEN, encode, model, random
from tests.helpers.kernels.tiles import GATED, PROGRAMS, QUICK, tile_start


@pytest.mark.parametrize(
    ("tiles", "whole"),
    [(980, 924), (260, 260), (760, 760), (280, 264), (60, 0), (66, 0), (67, 67), (132, 132), (1, 0)],
)
def test_tiles_of_the_last_wave_are_halved_where_their_halves_fit_in_it(tiles: int, whole: int) -> None:
    assert num_whole(tiles, PROGRAMS) == whole


@pytest.mark.parametrize("act", [QUICK, GATED])
@pytest.mark.parametrize(("rows", "outputs"), [(6256, 5120), (300, 8960), (1, 136), (1600, 1000), (129, 256)])
def test_every_output_is_computed_once(act: int, rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_mainloop.gl, "minimum", min)
    tiles, part = num_tiles(rows, outputs, act == GATED), 128 if act == GATED else 256
    whole = num_whole(tiles, PROGRAMS)
    seen = torch.zeros(-(-rows // 128) * 128, -(-outputs // part) * part, dtype=torch.int32)
    for wide, units in ((256, whole), (128, 2 * (tiles - whole))):
        for unit in range(units):
            row, output = tile_start(unit, rows, outputs, whole, wide, act)
            seen[row : row + 128, output : output + part * wide // 256] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(6256, True), (1564, True), (1280, True), (896, False), (640, True), (512, False), (384, True), (256, False)],
)
def test_a_tower_s_product_is_chosen_as_it_was_measured(rows: int, expected: bool) -> None:
    assert suits(rows, 1280, 5120, False, PROGRAMS) is expected


@pytest.mark.parametrize(("rows", "expected"), [(1600, True), (1216, True), (512, True), (256, False), (128, False)])
def test_a_prompt_s_product_is_chosen_as_it_was_measured(rows: int, expected: bool) -> None:
    assert suits(rows, 1536, 8960, True, PROGRAMS) is expected


def test_rows_that_cannot_be_copied_in_boxes_go_another_way() -> None:
    assert suits(6256, 1280, 5120, False, PROGRAMS)
    assert not suits(6256, 1288, 5120, False, PROGRAMS)
    assert not suits(6256, 1280, 5128, False, PROGRAMS)


def test_without_such_a_device_there_is_no_kernel() -> None:
    assert linear_act(torch.zeros(512, 64).half(), torch.zeros(512, 64).half(), None, "quick_gelu") is None


@pytest.mark.parametrize("act", ["quick_gelu", "tanh_gelu", "silu_and_mul"])
def test_the_reference_is_the_product_and_then_the_layer_s_activation(act: str) -> None:
    x, weight, bias = random(5, 16), random(24, 16), random(24)
    expected = getattr(activation, act)(F.linear(x, weight, bias))
    torch.testing.assert_close(reference.linear_act(x, weight, bias, act), expected, atol=1e-5, rtol=1e-5)


class Counted:
    """The reference in the kernel's place."""

    def __init__(self, *modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        for module in modules:
            monkeypatch.setattr(module, "linear_act", self)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, act: str, out: Tensor | None = None) -> Tensor:
        self.calls += 1
        found = reference.linear_act(x, weight, bias, act)
        return found if out is None else out.copy_(found)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu_pytorch_tanh"])
def test_a_tower_gets_the_same_from_one_launch(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**QWEN, "vision_config": {**QWEN["vision_config"], "hidden_act": act}}
    patches = random(sum(grid.patches for grid in GRIDS), 24)
    expected = encode(model(raw, TorchVision(), Qwen2VL), patches, GRIDS)
    counted = Counted(vision, monkeypatch=monkeypatch)
    found = encode(model(raw, FusedVision(), Qwen2VL), patches, GRIDS)
    assert counted.calls == 2  # blocks
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [40, 600])
def test_a_layer_of_the_decoder_gets_the_same_from_one_launch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, counted = decoder(), Counted(gemm_table, monkeypatch=monkeypatch)
    layer, x = made.layers[0], rows_of(rows, 64, 1)
    ways = gemms.DecoderGemms(made).for_rows(rows)
    found = total(ways.mlp(Residual(x), layer.mlp_norm, layer.mlp))
    assert counted.calls == 1
    torch.testing.assert_close(found, plain_mlp(x, layer), atol=8e-3, rtol=8e-3)
