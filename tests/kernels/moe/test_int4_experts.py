"""Experts in INT4 against the layer, which dequantises them: in Triton's interpreter, or on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.moe.experts import TileConfig
from saccade.kernels.moe.experts_gemv import VectorConfig
from saccade.kernels.moe.experts_int4 import int4_moe_gate_up
from saccade.kernels.moe.fused_moe import MoELaunch, choose_int4, fused_moe
from saccade.kernels.moe.sorting import sort_by_expert
from saccade.models.cuda import moe
from saccade.models.int4_weights import GroupScales, Int4Format, Int4Weights
from saccade.models.layers.moe import MoE
from saccade.models.state_dict import Parameters
from saccade.models.weights import fill_random
from tests.helpers.kernels.moe import DEVICE, config, random

HIDDEN = 384  # three chunks: no power of two
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = 3e-2 if DEVICE.type == "cuda" else 8e-3
TILE = TileConfig(outputs=64, inputs=256, stages=2, group=2)
VECTOR = MoELaunch(0, VectorConfig(32, 1024, warps=1), VectorConfig(64, 256, warps=1))
TILES = MoELaunch(16, TILE, TILE)
LAYOUTS = pytest.mark.parametrize(("group", "has_zeros"), [(128, False), (128, True), (64, True), (32, True)], ids=str)


def make_layer(group: int = 64, has_zeros: bool = True, width: int = 128, **changes: object) -> MoE:
    own = Int4Format(group, has_zeros, torch.float16)
    params = (
        Parameters(HALF, DEVICE, quantized=Int4Weights({}, default=own)).within("decoder").within("layers").within(0)
    )
    layer = MoE(params, HIDDEN, config(width=width, count=4, per_token=2, **changes))
    fill_random(params.targets, 0, DEVICE, params.scales)
    generator = torch.Generator().manual_seed(1)
    for scales in params.scales.values():
        assert isinstance(scales, GroupScales)
        scales.scales.mul_(0.5 + torch.rand(scales.scales.shape, generator=generator).to(DEVICE))
        if scales.zeros is not None:
            scales.zeros.copy_(torch.randint(6, 11, scales.zeros.shape, generator=generator))
    return layer


def run(layer: MoE, x: Tensor, launch: MoELaunch | None = None) -> Tensor:
    return fused_moe(x, moe.prepare_moe(layer), moe.routing_rules(layer), launch=launch)


def assert_agrees(layer: MoE, tokens: int, launch: MoELaunch | None = None) -> None:
    x = random(tokens, HIDDEN, dtype=HALF)
    torch.testing.assert_close(run(layer, x, launch), layer(x), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("launch", "tokens"), [(VECTOR, 1), (VECTOR, 3), (TILES, 7)], ids=["one", "few", "tiles"])
@LAYOUTS
def test_experts_compute_as_the_layer(launch: MoELaunch, tokens: int, group: int, has_zeros: bool) -> None:
    layer = make_layer(group, has_zeros)
    assert layer.gate_up.dtype == layer.down.dtype == torch.int16
    assert_agrees(layer, tokens, launch)


@pytest.mark.parametrize("tokens", [1, 20, 40, 70])
def test_chosen_launches_compute_as_the_layer(tokens: int) -> None:
    """Few tokens; then blocks of 16, 32 and 64 rows."""
    assert_agrees(make_layer(), tokens)


@pytest.mark.parametrize(("launch", "tokens"), [(VECTOR, 2), (TILES, 9)], ids=["vector", "tiles"])
def test_a_stacked_shared_expert_is_one_more(launch: MoELaunch, tokens: int) -> None:
    layer = make_layer(shared=128, shared_gate=True)
    assert layer.shared is None and len(layer.down) == 5
    assert_agrees(layer, tokens, launch)


@pytest.mark.parametrize(("launch", "tokens"), [(VECTOR, 2), (TILES, 9)], ids=["vector", "tiles"])
def test_gates_may_be_gelu(launch: MoELaunch, tokens: int) -> None:
    layer = make_layer()
    layer.gelu = True
    assert_agrees(layer, tokens, launch)


@pytest.mark.parametrize("tokens", [1, 9])
def test_one_of_two_weights_may_be_packed(tokens: int) -> None:
    layer = make_layer(width=96)  # no whole chunk
    assert layer.gate_up.dtype == torch.int16 and layer.down.dtype == HALF
    assert_agrees(layer, tokens)


def test_an_empty_block_and_an_expert_with_all_tokens_are_right() -> None:
    layer, x = make_layer(), random(37, HIDDEN, dtype=HALF)
    layer.routers.zero_()
    layer.routers[2] = x.float().sum(0)
    assert_agrees(layer, 37, TILES)


def test_steps_are_of_whole_chunks() -> None:
    layer, x = make_layer(), random(3, HIDDEN, dtype=HALF)
    pairs = sort_by_expert(torch.zeros(3, 2, dtype=torch.int32, device=DEVICE), 4, 16)
    scales = layer.gate_up_scales
    assert isinstance(scales, GroupScales)
    with pytest.raises(AssertionError):
        int4_moe_gate_up(x, Int4Weight(layer.gate_up, scales.scales), pairs, TILE._replace(inputs=64))
    with pytest.raises(AssertionError):
        int4_moe_gate_up(x[:, :256], Int4Weight(layer.gate_up, scales.scales), pairs, TILE)


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_chosen_tiles_fit_shared_memory(rows: int, shared: int) -> None:
    launch = choose_int4(rows, shared, hopper=shared == 227 << 10)
    assert launch.rows == min(rows, 64)
    for tiles, weights in ((launch.gate_up, 2), (launch.down, 1)):
        assert isinstance(tiles, TileConfig) and tiles.stages >= 2
        stage = (2 * launch.rows + weights * tiles.outputs / 2) * tiles.inputs
        assert stage * tiles.stages <= shared


def test_kernels_that_fail_their_self_test_leave_experts_to_be_dequantised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(moe.can_read_int4, "decided", {})
    monkeypatch.setattr(moe.can_read_int4, "self_test", fail)
    assert not moe.can_read_int4(DEVICE, HALF)
    line = "the kernels of experts in INT4 cannot be used: experts are dequantised as they load"
    assert caplog.text.count(line) == 1
    assert not moe.can_read_int4(DEVICE, torch.float32) and caplog.text.count("cannot be used") == 1
