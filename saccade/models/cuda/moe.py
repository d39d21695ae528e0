"""A layer's MoE with fused kernels: same weights and result as `layers.moe.MoE`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from saccade.kernels.moe.fused_moe import MoEWeights, fused_moe
from saccade.kernels.moe.router_gemm import split_router
from saccade.kernels.moe.topk_routing import RoutingRules
from saccade.models.layers.moe import MoE

_prepared: WeakKeyDictionary[MoE, MoEWeights] = WeakKeyDictionary()


def runs_in_one(experts: MoE) -> bool:
    """Whether kernels take all its experts, also the shared one."""
    return experts.shared is None


def run_moe(x: Tensor, experts: MoE, residual: Tensor | None = None) -> Tensor:
    """[T, H] -> [T, H], plus `residual`. A shared expert that is not stacked with them runs by itself."""
    weights = prepare_moe(experts)
    if runs_in_one(experts):
        return fused_moe(x, weights, routing_rules(experts), added=residual)
    assert residual is None, "the shared expert takes its place"
    assert experts.shared is not None
    gate = x.float() @ experts.routers[-1] if experts.rules.shared_gate else None
    return fused_moe(x, weights, routing_rules(experts), added=experts.shared(x), gate=gate)


def prepare_moe(experts: MoE) -> MoEWeights:
    """Once per layer, and before a CUDA graph is captured."""
    if experts not in _prepared:
        _prepared[experts] = _weights_of(experts)
    return _prepared[experts]


def _weights_of(experts: MoE) -> MoEWeights:
    """The router in bfloat16 parts for models of that dtype: their sum is the float32 weight."""
    rows = experts.routers if experts.shared is None else experts.routers[: experts.rules.count]
    router = split_router(rows) if experts.dtype == torch.bfloat16 else rows
    return MoEWeights(
        router,
        experts.router_bias,
        experts.gate_up,
        experts.down,
        experts.gate_up_scales,
        experts.down_scales,
    )


def routing_rules(experts: MoE) -> RoutingRules:
    rules = experts.rules
    return RoutingRules(
        top_k=rules.per_token,
        sigmoid=rules.scoring == "sigmoid",
        normalise=rules.normalise,
        scale=rules.scale,
        groups=rules.groups,
        groups_kept=rules.groups_kept,
        shared=rules.stacked_shared,
        shared_gate=rules.stacked_shared > 0 and rules.shared_gate,
    )
