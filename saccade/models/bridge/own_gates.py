"""Whether MLPs and experts are act(gate) * up where values are large too: a clamp shows in no usual row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.own_modules import Modules
from saccade.models.layers.activation import gate_and_mul

_LARGE = {torch.float16: 24.0}  # what a tenth of the values before a gate exceed; clamps: 7 to 16
_SEED = 20_260_719  # as no weights are made with, which would not be independent
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the largest value


def large_rows(gates: Callable[[Tensor], Tensor], width: int, like: Tensor) -> Tensor:
    """[3, width] for which many gates, and not only those of the largest weights, get large values."""
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(_SEED)).to(like)
    values = gates(x).float().abs().flatten()
    usual = values.kthvalue(math.ceil(0.9 * len(values))).values
    return (x * (_LARGE.get(like.dtype, 64.0) / usual)).to(like)


@torch.no_grad()
def check_gates(layer: Any, modules: Modules, *, gelu: bool) -> None:
    """Raises Unfit if one of a layer's MLPs, or its experts, compute more than ours."""
    for prefix in ("", "shared."):
        if modules.get(f"{prefix}down"):
            _check_mlp(layer, modules[f"{prefix}gate_up"], modules[f"{prefix}down"][0], gelu)
    for experts in modules.get("experts", ()):
        _check_experts(experts, gelu)


def _check_mlp(layer: Any, gate_up: Any, down: Any, gelu: bool) -> None:
    mlp = next(part for part in layer.modules() if any(child is down for child in part.children()))

    def gates(x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in gate_up], dim=-1)

    x = large_rows(gates, gate_up[0].in_features, next(layer.parameters()))
    _check_same(mlp(x[None])[0], down(gate_and_mul(gates(x), gelu=gelu)))


def _check_experts(experts: Any, gelu: bool) -> None:
    """The first of them. Their weights may lie transposed."""
    gate_up, down = (weights[0] for weights in (experts.gate_up_proj, experts.down_proj))
    if down.shape[-1] * 2 != len(gate_up):
        gate_up, down = gate_up.T, down.T
    x = large_rows(lambda x: x @ gate_up.T, gate_up.shape[1], gate_up)
    first = torch.zeros(len(x), 1, dtype=torch.long, device=x.device)
    _check_same(experts(x, first, torch.ones_like(x[:, :1])), gate_and_mul(x @ gate_up.T, gelu=gelu) @ down.T)


def _check_same(theirs: Tensor, ours: Tensor) -> None:
    difference = (theirs.float() - ours.float()).abs().max()
    if not difference <= _TOLERANCE[theirs.dtype] * ours.float().abs().max():
        raise Unfit("its MLPs change large values, as ours do not")
