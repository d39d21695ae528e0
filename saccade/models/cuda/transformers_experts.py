"""Experts inside Transformers' layers by our kernels. Which of them a token takes the model chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.moe.fused_moe import MoEWeights, run_experts
from saccade.kernels.moe.topk_routing import Routed
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.own_experts import dense_experts
from saccade.models.bridge.own_gates import large_rows

_WEIGHTS = {"gate_up_proj", "down_proj"}


class FusedExperts:
    def __init__(self, weights: MoEWeights) -> None:
        self.weights = weights

    def __call__(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """[T, H], and [T, slots] of each token -> [T, H]"""
        routed = Routed(shares.float().contiguous(), experts.int().contiguous())
        return run_experts(x.contiguous(), self.weights, routed)

    def examples(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens of two experts each, first and last ones among them; and large ones."""
        gate_up = self.weights.gate_up
        count, _, hidden = gate_up.shape
        x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0)).to(gate_up)
        experts = torch.tensor([[0, count - 1], [count // 2, 0], [count - 1, count // 2]], device=x.device)
        for rows in (x, large_rows(lambda x: x @ gate_up[0].T, hidden, x)):
            yield rows, experts, torch.tensor([[0.7, 0.3]] * 3).to(x)


def are_experts(module: Any) -> bool:
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    return tensors.keys() == _WEIGHTS and all(tensor.dim() == 3 for tensor in tensors.values())


def fused_experts(module: Any) -> Iterator[FusedExperts]:
    """What these may compute: gates by SiLU, or by GELU."""
    try:
        gate_up, down = dense_experts(module)
    except Unfit:
        return
    for gelu in (False, True):
        yield FusedExperts(MoEWeights(gate_up.new_empty(0), None, gate_up, down, gelu=gelu))
