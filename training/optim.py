"""Muon for the matrices of the network, AdamW for everything else, and an average of the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic of Keller Jordan's Muon


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal. Matrices of one shape are handled together, in few launches.

    Updates are scaled to the size AdamW's have, so that one learning rate serves both.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for same in shapes.values():
                self._update(same, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        averages = []
        for p in params:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            averages.append(state["momentum"])
        torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, averages, group["momentum"])  # Nesterov
        scale = 0.2 * max(params[0].shape) ** 0.5
        update = orthogonal(torch.stack(list(ahead))).to(params[0].dtype)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(update.unbind(0)), alpha=-group["lr"] * scale)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] -> nearly the nearest matrices with orthonormal rows or columns."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()  # many CPUs only emulate bfloat16
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.mT if is_tall else x
    return out


def optimizers(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.dim() == 2 and "embed_tokens" not in name and not name.startswith("dense.")
        (matrices if is_hidden else rest).append(parameter)
    is_cuda = rest[0].is_cuda
    return [
        Muon(matrices, lr, weight_decay),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.0, fused=is_cuda),
    ]


class Average:
    """An exponential average of the weights, slow when training is long."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._live: list[Tensor] = list(model.parameters())
        self._decay, self._steps = decay, 0
        self.weights = [p.detach().clone() for p in self._live]

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 10))
        torch._foreach_lerp_(self.weights, [p.detach() for p in self._live], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the average inside this context."""
        kept = [p.detach().clone() for p in self._live]
        self._load(self.weights)
        try:
            yield
        finally:
            self._load(kept)

    @torch.no_grad()
    def _load(self, weights: list[Tensor]) -> None:
        torch._foreach_copy_(self._live, weights)
