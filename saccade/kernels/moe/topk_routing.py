"""Routing: the experts of each token and their weights, from router logits. One program per token, no host copy.

    logits [SPLITS, T, E]   split-K partials of the router GEMM, added up here; E + 1 columns with a shared gate
    program t               | group 0 .... | group 1 .... |        [GROUPS, SIZE], padded to powers of two
    best groups kept        | group 0 .... |   dropped    |
    experts [t, slots]      | largest | second | ... top_k | E | E + 1 | .. shared experts
    weights [t, slots]      | scores, normalised, scaled   | 1 or sigmoid(logits[t, E])

A shared expert that is as wide as m routed ones is m further experts that every token goes to: the expert GEMMs then
need no launch of their own for it.

A score and its index are one integer key, as in `ops.argmax`: of equal scores the lowest index comes first. Scoring is
monotonic, so without a bias the logits themselves are compared. NaN is the largest; indices are valid for any input.
The reference is `MoE.route` of the layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

MAX_TOP_K = 16
_MIN = tl.constexpr(-(2**63))
_ELEMENTS = 512  # of a warp


class RoutingRules(NamedTuple):
    top_k: int
    sigmoid: bool = False  # scores by sigmoid, not softmax
    normalise: bool = False  # the weights of a token's routed experts add up to one
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1  # a group's score is its best expert; with a bias, the sum of its best two
    shared: int = 0  # experts after the routed ones that every token goes to
    shared_gate: bool = False  # their weight is the sigmoid of one more logit, not 1

    @property
    def slots(self) -> int:
        """Experts of a token."""
        return self.top_k + self.shared


class Routed(NamedTuple):
    weights: Tensor  # float32 [T, slots]
    experts: Tensor  # int32 [T, slots]


def route(logits: Tensor, rules: RoutingRules, bias: Tensor | None = None, scales: Tensor | None = None) -> Routed:
    """logits, float32 [T, E] or split-K partials [splits, T, E], contiguous; bias, float32 [E], selects only.

    `scales`, float32 [E], multiply the weights of each expert, once they are normalised.
    """
    tokens, columns = logits.shape[-2:]
    count = columns - int(rules.shared_gate)
    _check(logits, rules, bias, count)
    weights = torch.empty((tokens, rules.slots), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, rules.slots), dtype=torch.int32, device=logits.device)
    size = count // rules.groups
    padded = power_of_two(rules.groups) * power_of_two(size)
    pdl = supports_pdl(logits)
    _route_kernel[(tokens,)](
        logits, bias, weights, experts, tokens * columns, rules.scale, scales,
        SPLITS=logits.numel() // max(1, tokens * columns), COLUMNS=columns, GROUPS=rules.groups, SIZE=size,
        GROUPS_PADDED=power_of_two(rules.groups), SIZE_PADDED=power_of_two(size), KEPT=rules.groups_kept,
        TOP_K=rules.top_k, SHARED=rules.shared, SLOTS=power_of_two(rules.slots), IS_SIGMOID=rules.sigmoid,
        NORMALISE=rules.normalise, HAS_GATE=rules.shared_gate, PDL=pdl,
        num_warps=max(1, min(4, padded // _ELEMENTS)), **pdl_options(pdl),
    )  # fmt: skip
    return Routed(weights, experts)


def _check(logits: Tensor, rules: RoutingRules, bias: Tensor | None, count: int) -> None:
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert bias is None or (bias.shape == (count,) and bias.dtype == torch.float32 and bias.is_contiguous())
    assert rules.shared or not rules.shared_gate, rules
    if not 0 < rules.top_k <= MAX_TOP_K:
        raise ValueError(f"a token can go to {MAX_TOP_K} experts at most, not {rules.top_k}")
    within_reach = count // rules.groups * rules.groups_kept
    if count % rules.groups or rules.top_k > within_reach:
        raise ValueError(f"{rules.top_k} of {within_reach} experts, {count} in {rules.groups} groups, cannot be chosen")


@triton.jit(do_not_specialize=["part"])
def _route_kernel(
    logits: tl.tensor, bias: tl.tensor, weights: tl.tensor, experts: tl.tensor, part: tl.tensor, scale: tl.tensor,
    scales: tl.tensor,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, SIZE_PADDED: tl.constexpr, KEPT: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, SLOTS: tl.constexpr, IS_SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    HAS_GATE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.arange(0, GROUPS_PADDED)[:, None]
    member = tl.arange(0, SIZE_PADDED)[None, :]
    column = group * SIZE + member  # [GROUPS_PADDED, SIZE_PADDED]
    inside = (group < GROUPS) & (member < SIZE)
    pdl_release_then_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * COLUMNS
    values = _load_sum(row + column, inside, part, SPLITS)
    peak = tl.max(tl.max(tl.where(inside, values, float("-inf")), 1), 0)
    total = tl.sum(tl.sum(tl.where(inside, tl.exp(values - peak), 0.0), 1), 0)
    selection = values
    if bias is not None:
        selection = _score(values, peak, total, IS_SIGMOID) + tl.load(bias + column, mask=inside, other=0.0)
    keys = tl.where(inside, _key(selection, column), _MIN)
    if KEPT < GROUPS:
        keys = _drop_groups(keys, group, KEPT, GROUPS, bias is not None)
    experts_of_slots = _choose(tl.reshape(keys, [GROUPS_PADDED * SIZE_PADDED]), TOP_K, SLOTS)
    slot = tl.arange(0, SLOTS)
    is_routed = slot < TOP_K
    picked = _load_sum(row + experts_of_slots, is_routed, part, SPLITS)
    routing = tl.where(is_routed, _score(picked, peak, total, IS_SIGMOID), 0.0)
    if NORMALISE:
        routing = routing / (tl.sum(routing, 0) + 1e-20)
    routing *= scale
    if scales is not None:
        routing *= tl.load(scales + experts_of_slots, mask=is_routed, other=0.0)
    if SHARED > 0:
        by = 1.0
        if HAS_GATE:
            by = tl.sigmoid(_load_sum(row + GROUPS * SIZE + 0 * slot, slot >= TOP_K, part, SPLITS))
        routing = tl.where(is_routed, routing, by)
        experts_of_slots = tl.where(is_routed, experts_of_slots, GROUPS * SIZE + slot - TOP_K)
    target = token * (TOP_K + SHARED) + slot
    tl.store(weights + target, routing, mask=slot < TOP_K + SHARED)
    tl.store(experts + target, experts_of_slots, mask=slot < TOP_K + SHARED)


@triton.jit
def _load_sum(at: tl.tensor, mask: tl.tensor, part: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """Always in the same order, so a logit has the same bits wherever it is added up."""
    logits = tl.load(at, mask=mask, other=0.0)
    for i in tl.static_range(1, SPLITS):
        logits += tl.load(at + i * part, mask=mask, other=0.0)
    return logits


@triton.jit
def _score(values: tl.tensor, peak: tl.tensor, total: tl.tensor, IS_SIGMOID: tl.constexpr) -> tl.tensor:
    return tl.sigmoid(values) if IS_SIGMOID else tl.exp(values - peak) / total


@triton.jit
def _key(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The value's bits, mapped to integers of the same order, above the index counted backwards."""
    bits = values.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value(keys: tl.tensor) -> tl.tensor:
    order = (keys >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index(keys: tl.tensor) -> tl.tensor:
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _drop_groups(
    keys: tl.tensor, group: tl.tensor, KEPT: tl.constexpr, GROUPS: tl.constexpr, BEST_TWO: tl.constexpr
) -> tl.tensor:
    """Keys of experts outside the KEPT best groups become the least ones: they are never chosen."""
    best = tl.max(keys, 1)[:, None]  # [GROUPS_PADDED, 1]
    score = _value(best)
    if BEST_TWO:
        score += _value(tl.max(tl.where(keys == best, _MIN, keys), 1))[:, None]
    group_keys = tl.where(group < GROUPS, _key(score, group), _MIN)
    dropped = group_keys
    for _ in tl.static_range(KEPT):
        top = tl.max(dropped, 0)[None, :]
        dropped = tl.where(dropped == top, _MIN, dropped)
    return tl.where(dropped == _MIN, keys, _MIN)


@triton.jit
def _choose(keys: tl.tensor, TOP_K: tl.constexpr, SLOTS: tl.constexpr) -> tl.tensor:
    """Indices of the TOP_K largest keys, largest first: [SLOTS]."""
    slot = tl.arange(0, SLOTS)
    slots = tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, _MIN, keys)
        slots = tl.where(slot == i, _index(best), slots)
    return slots
