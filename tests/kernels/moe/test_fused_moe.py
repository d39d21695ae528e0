"""MoE kernels against the layer: in Triton's interpreter on the CPU, on the device where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.kernels.moe.combine import combine
from saccade.kernels.moe.experts import TileConfig, moe_down, moe_gate_up
from saccade.kernels.moe.experts_gemv import VectorConfig
from saccade.kernels.moe.fused_moe import MoELaunch, MoEWeights, choose, fit, fused_moe, run_experts
from saccade.kernels.moe.sorting import sort_by_expert
from saccade.kernels.moe.topk_routing import Routed
from saccade.models.layers.moe import MoE
from tests.helpers.kernels.moe import DEVICE, HIDDEN, config, make_layer, random, rules_of

# The interpreter multiplies bfloat16 matrices as if their bits were integers.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
ROUNDING = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 3e-2}
SMALL = TileConfig(outputs=16, inputs=32, stages=2)
VECTOR = MoELaunch(0, VectorConfig(16, 32, stages=2), VectorConfig(16, 16))
SWAPPED = MoELaunch(16, SMALL, SMALL._replace(inputs=16))
WIDE = MoELaunch(16, SMALL._replace(swapped=False, group=2), SMALL._replace(swapped=False, group=3))
LAUNCHES = pytest.mark.parametrize("launch", [VECTOR, SWAPPED, WIDE], ids=["vector", "swapped", "wide"])


def weights_of(layer: MoE) -> MoEWeights:
    routers = layer.routers[: layer.rules.count]
    own = {"gelu": layer.gelu, "expert_scales": layer.expert_scales}
    return MoEWeights(routers, layer.router_bias, layer.gate_up, layer.down, **own)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@LAUNCHES
@pytest.mark.parametrize("tokens", [1, 4, 7, 33])
def test_a_layer_computes_as_the_reference(launch: MoELaunch, tokens: int) -> None:
    layer, x = make_layer(config()), random(tokens, HIDDEN)
    assert_close(fused_moe(x, weights_of(layer), rules_of(layer.rules), launch=launch), layer(x))


@LAUNCHES
def test_gates_may_be_gelu_and_what_routes_another_tensor(launch: MoELaunch) -> None:
    layer, x, by = make_layer(config()), random(7, HIDDEN), random(7, HIDDEN, seed=2)
    layer.gelu, layer.expert_scales = True, 1 + random(8, seed=3) / 4
    found = fused_moe(x, weights_of(layer), rules_of(layer.rules), launch=launch, routed_by=by)
    assert_close(found, layer(x, by))


@LAUNCHES
def test_16_bit_layers_round_as_the_reference_does(launch: MoELaunch) -> None:
    layer, x = make_layer(config(), dtype=HALF), random(19, HIDDEN, dtype=HALF)
    assert_close(fused_moe(x, weights_of(layer), rules_of(layer.rules), launch=launch), layer(x))


@pytest.mark.parametrize(("tokens", "dtype"), [(1, HALF), (5, HALF), (40, HALF), (9, torch.float32)])
def test_chosen_launches_compute_as_the_reference(tokens: int, dtype: torch.dtype) -> None:
    layer, x = make_layer(config(count=4, per_token=2), dtype=dtype), random(tokens, HIDDEN, dtype=dtype)
    assert_close(fused_moe(x, weights_of(layer), rules_of(layer.rules)), layer(x))


@LAUNCHES
def test_all_tokens_may_choose_one_expert(launch: MoELaunch) -> None:
    layer, x = make_layer(config(per_token=1)), random(37, HIDDEN)
    layer.routers.zero_()
    layer.routers[5] = x.sum(0)
    x = x.sum(0, keepdim=True) + 0.01 * x
    assert (layer.route(x)[1] == 5).all()
    assert_close(fused_moe(x, weights_of(layer), rules_of(layer.rules), launch=launch), layer(x))


@LAUNCHES
def test_there_may_be_one_expert(launch: MoELaunch) -> None:
    layer, x = make_layer(config(count=1, per_token=1)), random(5, HIDDEN)
    assert_close(fused_moe(x, weights_of(layer), rules_of(layer.rules), launch=launch), layer(x))


@LAUNCHES
def test_sizes_need_not_fill_their_tiles(launch: MoELaunch) -> None:
    layer, x = make_layer(config(width=21), hidden=35), random(6, 35)
    assert_close(fused_moe(x, weights_of(layer), rules_of(layer.rules), launch=launch), layer(x))


@LAUNCHES
def test_two_runs_give_the_same_bits(launch: MoELaunch) -> None:
    layer, x = make_layer(config()), random(23, HIDDEN)
    first, second = (fused_moe(x, weights_of(layer), rules_of(layer.rules), launch=launch) for _ in range(2))
    assert torch.equal(first, second)


@LAUNCHES
@pytest.mark.parametrize("has_gate", [False, True], ids=["added", "gated"])
def test_a_shared_expert_is_added(launch: MoELaunch, has_gate: bool) -> None:
    layer, x = make_layer(config(shared=12, shared_gate=has_gate)), random(6, HIDDEN)
    assert layer.shared is not None
    gate = x.float() @ layer.routers[-1] if has_gate else None
    found = fused_moe(
        x, weights_of(layer), rules_of(layer.rules), launch=launch, addend=layer.shared(x).contiguous(), gate=gate
    )
    assert_close(found, layer(x))


@LAUNCHES
@pytest.mark.parametrize("has_gate", [False, True], ids=["added", "gated"])
def test_a_shared_expert_may_be_further_experts(launch: MoELaunch, has_gate: bool) -> None:
    """One as wide as two experts is two more of them."""
    layer, x = make_layer(config(shared=48, shared_gate=has_gate)), random(6, HIDDEN)
    weights = MoEWeights(layer.routers, None, layer.gate_up, layer.down)
    rules = rules_of(layer.rules)._replace(shared=2, shared_gate=has_gate)
    assert_close(fused_moe(x, weights, rules, launch=launch), layer(x))


def test_each_launch_does_its_part() -> None:
    layer, x = make_layer(config()), random(9, HIDDEN)
    weights, experts = layer.route(x)
    routed = Routed(weights, experts.int())
    pairs = sort_by_expert(routed.experts, 8, 16)
    wide = moe_gate_up(x, layer.gate_up, pairs, SMALL)
    made = moe_down(wide, layer.down, pairs, routed.weights, SMALL)
    expected = layer._run_experts(x, experts)
    assert_close(made.view(9, 3, HIDDEN), expected * weights[..., None])
    assert_close(combine(made, 3), layer(x))
    assert_close(run_experts(x, weights_of(layer), routed, launch=SWAPPED), layer(x))


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("tokens", [8, 256, 512, 8192])
def test_chosen_tiles_fit_shared_memory(tokens: int, shared: int) -> None:
    launch = choose(tokens, 8, 128, torch.bfloat16, shared, tma=True)
    assert isinstance(launch.gate_up, TileConfig) and isinstance(launch.down, TileConfig)
    for tiles, weights in ((launch.gate_up, 2), (launch.down, 1)):
        assert (launch.rows + weights * tiles.outputs) * tiles.inputs * 2 * tiles.stages <= shared
    assert fit(launch, 2, shared) == launch
