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
from saccade.models.bridge.own_modules import Modules
from saccade.models.layers.moe import MoE
from saccade.models.state_dict import Parameters

_ROWS = 256  # that are routed to find the rules
_BIAS = "e_score_correction_bias"
_GROUPS = ("num_group", "n_group")


@torch.no_grad()
def experts_of(layer: Modules) -> MoEConfig:
    """The rules of a layer's experts. `layers` is empty."""
    experts, router = layer["experts"][0], layer["router"][0]
    if _tensors(experts) != {"gate_up_proj", "down_proj"}:
        raise Unfit("its experts are stored in another way")
    count, wide, hidden = experts.gate_up_proj.shape
    if experts.down_proj.shape != (count, hidden, wide // 2):
        raise Unfit("its experts are stored in another way")
    if _tensors(router) - {"weight", _BIAS}:
        raise Unfit("its router has more weights than ours")
    rules = MoEConfig(
        layers=(),
        count=count,
        per_token=int(router.top_k),
        width=wide // 2,
        shared=sum(part.weight.shape[1] for part in layer["shared.down"]),
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


def _tensors(module: Any) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


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


def share_experts(ours: MoE, layer: Modules) -> None:
    experts = layer["experts"][0]
    ours.gate_up = experts.gate_up_proj.data
    ours.down = experts.down_proj.data
    _set_router(ours, layer["router"][0], *(gate.weight.data for gate in layer["shared_gate"]))
