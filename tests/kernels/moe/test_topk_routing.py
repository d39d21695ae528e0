"""Routing and sorting against the layer and PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.kernels.moe.router_gemm import RouterConfig, choose_router, router_logits, split_router
from saccade.kernels.moe.sorting import max_blocks, sort_by_expert
from saccade.kernels.moe.topk_routing import RoutingRules, route
from tests.helpers.kernels.moe import DEVICE, HIDDEN, config, make_layer, random, rules_of

RULES = {
    "softmax": {},
    "scaled": {"normalise": False, "scale": 2.5},
    "sigmoid": {"scoring": "sigmoid"},
    "bias": {"scoring": "sigmoid", "choice": "noaux_tc"},
    "softmax bias": {"choice": "noaux_tc"},
    "groups": {"choice": "group_limited_greedy", "groups": 4, "groups_kept": 2},
    "groups bias": {"choice": "noaux_tc", "scoring": "sigmoid", "groups": 3, "groups_kept": 2, "scale": 0.5},
    "all groups": {"choice": "noaux_tc", "groups": 2, "groups_kept": 2},
}


@pytest.mark.parametrize("name", RULES)
def test_tokens_are_routed_as_the_layer_does(name: str) -> None:
    layer = make_layer(config(count=12, per_token=4, **RULES[name]))
    x = random(21, HIDDEN)
    expected, indices = layer.route(x)
    found = route(torch.nn.functional.linear(x, layer.routers), rules_of(layer.rules), layer.router_bias)
    assert torch.equal(found.experts.long(), indices)
    torch.testing.assert_close(found.weights, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 2), (72, 6), (512, 16)])
def test_any_number_of_experts_may_be_chosen_from(experts: int, top_k: int) -> None:
    logits = random(3, experts)
    found = route(logits, RoutingRules(top_k))
    expected, indices = logits.softmax(-1).topk(top_k)
    assert torch.equal(found.experts.long(), indices)
    torch.testing.assert_close(found.weights, expected)


def test_of_equal_scores_the_first_are_chosen() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, -1.0]], device=DEVICE)
    assert route(logits, RoutingRules(4)).experts.tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_experts_are_valid_for_any_logits(value: float) -> None:
    experts = route(torch.full((2, 6), value, device=DEVICE), RoutingRules(3, groups=2, groups_kept=1)).experts
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_partials_of_logits_are_added_up() -> None:
    parts = random(3, 5, 8)
    found = route(parts, RoutingRules(2))
    expected = route(parts.sum(0), RoutingRules(2))
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights)


def test_shared_experts_follow_the_routed_ones() -> None:
    logits = random(4, 9)
    found = route(logits, RoutingRules(2, shared=2, shared_gate=True, scale=3.0))
    routed = route(logits[:, :8].contiguous(), RoutingRules(2, scale=3.0))
    assert torch.equal(found.experts[:, :2], routed.experts)
    assert found.experts[:, 2:].tolist() == [[8, 9]] * 4
    torch.testing.assert_close(found.weights[:, :2], routed.weights)
    torch.testing.assert_close(found.weights[:, 2:], logits[:, 8:].sigmoid().expand(4, 2))


def test_too_many_experts_per_token_are_refused() -> None:
    with pytest.raises(ValueError, match="16 experts at most, not 17"):
        route(random(1, 32), RoutingRules(17))
    with pytest.raises(ValueError, match="5 of 4 experts"):
        route(random(1, 8), RoutingRules(5, groups=2, groups_kept=1))


@pytest.mark.parametrize(("tokens", "splits"), [(1, 4), (17, 1), (33, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_router_logits_keep_float32_digits(tokens: int, splits: int, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 200, dtype=dtype), random(20, 200, seed=2)
    found = router_logits(x, weight, RouterConfig(16, 16, 32, splits, stages=2))
    assert found.shape == (splits, tokens, 20)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(found.sum(0), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("experts", "config"), [(20, (16, 16, 32, 3)), (33, (16, 32, 64, 2)), (32, (32, 32, 64, 4))])
def test_router_logits_of_split_weights_keep_float32_digits(experts: int, config: tuple[int, ...]) -> None:
    x, weight = random(21, 200, dtype=torch.float16), random(experts, 200, seed=2)
    found = router_logits(x, split_router(weight, torch.float16), RouterConfig(*config, stages=2))
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(found.sum(0), expected, atol=1e-5, rtol=1e-5)


def test_three_bfloat16_parts_are_the_router_weight() -> None:
    weight = random(7, 300, seed=4) / 300
    parts = split_router(weight)
    assert parts.dtype == torch.bfloat16 and parts.shape == (3, 7, 300)
    assert torch.equal(parts.double().sum(0), weight.double())


@pytest.mark.parametrize("tokens", [1, 8, 128, 1600, 8192])
def test_every_split_of_the_router_has_columns(tokens: int) -> None:
    chosen = choose_router(tokens, 128, 2048, 132)
    steps = -(-2048 // chosen.inputs)
    assert (chosen.splits - 1) * -(-steps // chosen.splits) < steps


def check_sorted(experts: Tensor, count: int, rows: int, max_counted: int | None = None) -> None:
    found = sort_by_expert(experts, count, rows, max_counted=max_counted)
    flat = experts.flatten()
    assert torch.equal(found.order.long(), flat.argsort(stable=True))
    expected = []
    first = 0
    for expert, size in enumerate(torch.bincount(flat, minlength=count).tolist()):
        expected += [(expert, first + i, min(rows, size - i)) for i in range(0, size, rows)]
        first += size
    table = [tuple(block) for block in found.blocks.T.tolist()]
    assert len(expected) <= len(table) == max_blocks(flat.numel(), count, rows)
    assert table[: len(expected)] == expected
    assert all(block[2] == 0 for block in table[len(expected) :])


@pytest.mark.parametrize("max_counted", [None, 0], ids=["few", "many"])
@pytest.mark.parametrize(("tokens", "slots", "count"), [(1, 1, 1), (1, 8, 20), (50, 3, 7), (300, 6, 72), (90, 8, 3)])
def test_pairs_are_sorted_and_cut_into_blocks(tokens: int, slots: int, count: int, max_counted: int | None) -> None:
    experts = torch.randint(count, (tokens, slots), generator=torch.Generator().manual_seed(3)).int().to(DEVICE)
    check_sorted(experts, count, 16, max_counted)


@pytest.mark.parametrize("max_counted", [None, 0], ids=["few", "many"])
def test_one_expert_may_have_all_pairs(max_counted: int | None) -> None:
    check_sorted(torch.full((70, 2), 3, dtype=torch.int32, device=DEVICE), 5, 32, max_counted)


def test_one_pair_per_expert_fills_the_table() -> None:
    check_sorted(torch.arange(40, dtype=torch.int32, device=DEVICE).view(5, 8), 40, 16)
