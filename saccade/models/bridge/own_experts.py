"""Experts of Transformers' layers as ours: where they are stored alike, and a router's choices are ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint.moe_config import MoEConfig
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.own_modules import Modules, eps_of
from saccade.models.bridge.stored import named_weights, shape_of, stored_of
from saccade.models.layers.moe import MoE
from saccade.models.state_dict import Parameters

_ROWS = 256  # that are routed to find the rules
_BIAS = "e_score_correction_bias"
_GROUPS = ("num_group", "n_group")
_SCALED_ROUTER = {"scale", "per_expert_scale", "proj.weight"}


@torch.no_grad()
def experts_of(layer: Modules) -> MoEConfig:
    """The rules of a layer's experts. `layers` is empty."""
    experts, router = layer["experts"][0], layer["router"][0]
    count, wide, hidden = _stacked(experts)[0]
    if _tensors(router) - {"weight", _BIAS}:
        raise Unfit("its router has more weights than ours")
    rules = MoEConfig(
        layers=(),
        count=count,
        per_token=int(router.top_k),
        width=wide // 2,
        shared=sum(part.in_features for part in layer["shared.down"]),
        shared_gate=bool(layer["shared_gate"]),
        stacks_shared=False,  # their tensors stay as they are
    )
    exact = copy.deepcopy(router).float()
    x = torch.randn(_ROWS, hidden, generator=torch.Generator().manual_seed(0)).to(router.weight.device)
    *_, weights, chosen = exact(x)
    expected = x.new_zeros(_ROWS, count).scatter_(1, chosen, weights.float())
    for candidate in _candidates(rules, router):
        ours = MoE(Parameters(torch.float32, torch.device("meta")), hidden, candidate)
        _set_router(ours, router)
        weights, chosen = ours.route(x)
        if torch.allclose(x.new_zeros(_ROWS, count).scatter_(1, chosen, weights), expected, 1e-4, 1e-5):
            return candidate
    raise Unfit("its router chooses experts in another way")


@torch.no_grad()
def experts_beside(layer: Modules) -> MoEConfig:
    """The rules of experts beside an MLP. A softmax routes, scaled for each expert."""
    experts, router = layer["experts"][0], layer["router"][0]
    count, wide, hidden = _stacked(experts)[0]
    if _tensors(router) != _SCALED_ROUTER:
        raise Unfit("its router has other weights than ours")
    exact = copy.deepcopy(router).float()
    x = torch.randn(_ROWS, hidden, generator=torch.Generator().manual_seed(0)).to(router.scale.device)
    *_, weights, expected_choice = exact(x)
    rules = MoEConfig((), count, expected_choice.shape[1], wide // 2, normalise=True, stacks_shared=False)
    ours = MoE(Parameters(torch.float32, torch.device("meta")), hidden, rules)
    _set_scaled_router(ours, router)
    normed = torch.nn.functional.rms_norm(x, (hidden,), eps=eps_of(router)) * router_norm(router)
    shares, choice = ours.route(normed)
    theirs = x.new_zeros(_ROWS, count).scatter_(1, expected_choice, weights)
    if not torch.allclose(x.new_zeros(_ROWS, count).scatter_(1, choice, shares), theirs, 1e-4, 1e-5):
        raise Unfit("its router chooses experts in another way")
    return rules


def router_norm(router: Any) -> Tensor:
    """The weight of the norm of its input: float32."""
    scale: Tensor = router.scale.detach().float()
    return scale * float(router.scalar_root_size)


def _set_scaled_router(ours: MoE, router: Any) -> None:
    ours.routers = router.proj.weight.data.float()
    ours.expert_scales = router.per_expert_scale.data.float()


def share_experts_beside(ours: MoE, layer: Modules) -> None:
    _share_stacked(ours, layer)
    _set_scaled_router(ours, layer["router"][0])


def _tensors(module: Any) -> set[str]:
    return {name for name, _ in named_weights(module)}


def _candidates(rules: MoEConfig, router: Any) -> Iterator[MoEConfig]:
    groups = next((int(getattr(router, name)) for name in _GROUPS if getattr(router, name, None)), 1)
    kept = int(getattr(router, "topk_group", None) or groups)
    choice = "greedy"
    if hasattr(router, _BIAS):
        choice = "noaux_tc"
    elif groups > 1:
        choice = "group_limited_greedy"
    rules = replace(rules, groups=groups, groups_kept=kept, choice=choice)
    scales = {1.0, float(getattr(router, "routed_scaling_factor", 1.0))}
    for scoring in ("softmax", "sigmoid"):
        for normalise in (False, True):
            for scale in scales:
                yield replace(rules, scoring=scoring, normalise=normalise, scale=scale)


def _set_router(ours: MoE, router: Any, *gates: Tensor) -> None:
    ours.routers = torch.cat([router.weight.data, *gates]).float()
    if ours.router_bias is not None:
        ours.router_bias = getattr(router, _BIAS).data.float()


def _stacked(experts: Any) -> tuple[tuple[int, ...], bool]:
    """[E, 2 I, H], beside [E, H, I]; and whether they are stored with inputs and outputs transposed."""
    if _tensors(experts) != {"gate_up_proj", "down_proj"}:
        raise Unfit("its experts are stored in another way")
    gate_up, down = (shape_of(experts, name) for name in ("gate_up_proj", "down_proj"))
    for is_transposed in (False, True):
        count, wide, hidden = gate_up
        if down == (count, hidden, wide // 2):
            return gate_up, is_transposed
        gate_up, down = ((count, columns, rows) for count, rows, columns in (gate_up, down))
    raise Unfit("its experts are stored in another way")


def dense_experts(experts: Any) -> tuple[Tensor, Tensor]:
    """[E, 2 I, H] and [E, H, I], dense: what is stored becomes their views."""
    _, is_transposed = _stacked(experts)
    parts = []
    for param in (experts.gate_up_proj, experts.down_proj):
        part = (param.data.transpose(1, 2) if is_transposed else param.data).contiguous()
        param.data = part.transpose(1, 2) if is_transposed else part
        parts.append(part)
    return parts[0], parts[1]


def _share_stacked(ours: MoE, layer: Modules) -> None:
    experts = layer["experts"][0]
    stored = {name: stored_of(experts, f"{name}_proj") for name in ("gate_up", "down")}
    if None in stored.values():
        ours.gate_up, ours.down = dense_experts(experts)
        return
    for name, one in stored.items():
        setattr(ours, name, one.weight)
        setattr(ours, f"{name}_scales", one.scales)


def share_experts(ours: MoE, layer: Modules) -> None:
    _share_stacked(ours, layer)
    _set_router(ours, layer["router"][0], *(gate.weight.data for gate in layer["shared_gate"]))
