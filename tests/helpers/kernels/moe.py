"""MoE layers with random weights, and the routing rules of their configs."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.checkpoint.moe_config import MoEConfig
from saccade.kernels.moe.topk_routing import RoutingRules
from saccade.models.layers.moe import MoE
from saccade.models.state_dict import Parameters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 40


def config(**changes: object) -> MoEConfig:
    fields: dict[str, object] = {"layers": (0,), "count": 8, "per_token": 3, "width": 24, "normalise": True}
    return MoEConfig(**{**fields, **changes})  # type: ignore[arg-type]


def make_layer(config: MoEConfig, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> MoE:
    params = Parameters(dtype, DEVICE)
    layer = MoE(params.within("experts"), hidden, config)
    generator = torch.Generator().manual_seed(0)
    for tensor in params.targets.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(1, tensor.shape[-1]) ** 0.5)
    return layer


def rules_of(config: MoEConfig) -> RoutingRules:
    return RoutingRules(
        config.per_token, config.scoring == "sigmoid", config.normalise, config.scale, config.groups, config.groups_kept
    )


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
