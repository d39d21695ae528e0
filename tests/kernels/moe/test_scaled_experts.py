"""Experts in float8 against the layer, which dequantises them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.kernels.moe.experts import TileConfig, moe_down, moe_gate_up
from saccade.kernels.moe.experts_gemv import VectorConfig
from saccade.kernels.moe.fused_moe import MoELaunch, MoEWeights, choose, fused_moe
from saccade.kernels.moe.sorting import sort_by_expert
from saccade.kernels.ops.quantize_rows import quantize_rows
from saccade.models.fp8_weights import Fp8Weights, quantized
from saccade.models.layers.moe import MoE
from saccade.models.state_dict import Parameters
from tests.helpers.kernels.moe import DEVICE, config, random, rules_of

HIDDEN = 256
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = 3e-2 if DEVICE.type == "cuda" else 8e-3
TILE = TileConfig(outputs=64, inputs=64, stages=2)
VECTOR = MoELaunch(0, VectorConfig(32, 128, stages=1), VectorConfig(64, 128, warps=1))
SWAPPED = MoELaunch(16, TILE, TILE)
WIDE = MoELaunch(16, TILE._replace(swapped=False), TILE._replace(outputs=128, swapped=False))


def make_layer(in_blocks: bool) -> MoE:
    names = Fp8Weights(in_blocks, None)
    params = Parameters(HALF, DEVICE, quantized=names).within("decoder").within("layers").within(0)
    layer = MoE(params, HIDDEN, config(width=128, count=4, per_token=2))
    assert layer.gate_up_scales is not None and layer.down_scales is not None
    layer.routers.copy_(random(4, HIDDEN, seed=5))
    for weight, scales in ((layer.gate_up, layer.gate_up_scales), (layer.down, layer.down_scales)):
        made = random(*weight.shape, seed=weight.shape[1]) / weight.shape[-1] ** 0.5
        values, found = quantized(made, in_blocks)
        weight.copy_(values)
        scales.copy_(found)
    return layer


def run(layer: MoE, x: Tensor, launch: MoELaunch | None) -> Tensor:
    scales = (layer.gate_up_scales, layer.down_scales)
    weights = MoEWeights(layer.routers, layer.router_bias, layer.gate_up, layer.down, *scales, gelu=layer.gelu)
    return fused_moe(x, weights, rules_of(layer.rules), launch=launch)


@pytest.mark.parametrize("in_blocks", [True, False], ids=["blocks", "rows"])
@pytest.mark.parametrize("launch", [VECTOR, SWAPPED, WIDE], ids=["vector", "swapped", "wide"])
def test_experts_compute_as_the_layer(launch: MoELaunch | None, in_blocks: bool) -> None:
    layer = make_layer(in_blocks)
    x = random(3, HIDDEN, dtype=HALF)
    for layer.gelu in (False, True):
        torch.testing.assert_close(run(layer, x, launch), layer(x), atol=TOLERANCE, rtol=TOLERANCE)


def test_the_chosen_launch_of_a_token_computes_as_the_layer() -> None:
    """With narrow tiles, which the interpreter takes long for. The launch of many tokens is below."""
    layer, x = make_layer(True), random(1, HIDDEN, dtype=HALF)
    torch.testing.assert_close(run(layer, x, None), layer(x), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("inputs", "in_blocks"), [(64, True), (128, True), (128, False)])
def test_rows_in_float8_are_rounded_and_no_more(inputs: int, in_blocks: bool) -> None:
    layer = make_layer(in_blocks)
    tile = TILE._replace(inputs=inputs, swapped=False)
    experts = torch.arange(42, dtype=torch.int32, device=DEVICE).view(21, 2) % 4
    pairs = sort_by_expert(experts, 4, 16)
    shares = random(21, 2).abs()
    x, wide = random(21, HIDDEN, dtype=HALF), random(42, 128, dtype=HALF)
    values, scales, _ = quantize_rows(x, 128)
    found = moe_gate_up(values, layer.gate_up, pairs, tile, layer.gate_up_scales, scales, HALF)
    expected = moe_gate_up(rounded(x), layer.gate_up, pairs, tile, layer.gate_up_scales)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    values, scales, _ = quantize_rows(wide, 128)
    found = moe_down(values, layer.down, pairs, shares, tile, layer.down_scales, scales, HALF)
    expected = moe_down(rounded(wide), layer.down, pairs, shares, tile, layer.down_scales)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def rounded(x: Tensor) -> Tensor:
    """To float8 and back, with a scale for 128 columns."""
    values, scales, _ = quantize_rows(x, 128)
    found = values[: len(x)].view(len(x), -1, 128).float() * scales.T[: len(x), :, None]
    return found.view(x.shape).to(x.dtype)


def test_a_layer_with_rows_in_float8_is_close() -> None:
    layer = make_layer(True)
    tile = TILE._replace(swapped=False)
    x = random(21, HIDDEN, dtype=HALF)
    found = run(layer, x, MoELaunch(16, tile, tile, quantized=True)).float()
    expected = layer(x).float()
    assert 1e-3 < float((found - expected).norm() / expected.norm()) < 0.06  # two roundings to four bits


def test_many_tokens_have_tiles_within_a_block() -> None:
    layer = make_layer(True)
    x = random(40, HIDDEN, dtype=HALF)
    torch.testing.assert_close(run(layer, x, None), layer(x), atol=TOLERANCE, rtol=TOLERANCE)
    widest = choose(4096, 2, 4, HALF, 227 << 10, tma=False).down
    assert isinstance(widest, TileConfig) and widest.outputs > 128  # which a launch for float8 has to halve
    with pytest.raises(AssertionError):
        pairs = sort_by_expert(torch.zeros(40, 2, dtype=torch.int32, device=DEVICE), 4, 16)
        moe_gate_up(x, layer.gate_up, pairs, TILE._replace(outputs=256), layer.gate_up_scales)
