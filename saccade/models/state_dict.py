"""A model's parameters by name, allocated before weights are loaded into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Whole(NamedTuple):
    """Several targets as one tensor, for checkpoints that store them fused."""

    tensor: Tensor
    parts: frozenset[str]  # the targets that it covers


class Packable(Protocol):
    """A GEMM whose weight can be packed."""

    weight: Tensor

    def pack(self) -> None: ...


class Parameters:
    """Allocates a model's tensors and registers each under a name.

    `targets` has one entry per tensor of a checkpoint. For fused projections (such as q, k and v) the entries
    are views of the parts. `wholes` has tensors that a checkpoint may store fused instead. What is under the
    level `left_out` has names and shapes, but no memory.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, left_out: str | None = None) -> None:
        self.dtype = dtype
        self.device = device
        self._left_out = left_out
        self.targets: dict[str, Tensor] = {}
        self.wholes: dict[str, Whole] = {}
        self.linears: list[Packable] = []
        self._prefix = ""

    def within(self, name: str | int) -> Parameters:
        """The same collection, with this level added to the prefix."""
        device = torch.device("meta") if name == self._left_out else self.device
        inner = Parameters(self.dtype, device)
        inner.targets = self.targets
        inner.wholes = self.wholes
        inner.linears = self.linears
        inner._prefix = f"{self._prefix}{name}."
        return inner

    def each(self, name: str, count: int) -> list[Parameters]:
        """Of so many layers: the level `name.0`, `name.1` and so on."""
        return [self.within(name).within(index) for index in range(count)]

    def full_name(self, name: str) -> str:
        return self._prefix + name

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def add(self, name: str, tensor: Tensor) -> None:
        self.targets[self._prefix + name] = tensor

    def add_whole(self, name: str, tensor: Tensor, parts: Sequence[str]) -> None:
        self.wholes[self._prefix + name] = Whole(tensor, frozenset(self._prefix + part for part in parts))

    def give_up_names(self) -> None:
        """Once weights are loaded and `encoder_weights` was asked: layers alone hold the tensors then."""
        self.targets.clear()
        self.wholes.clear()

    def new(self, name: str, *shape: int) -> Tensor:
        tensor = self.empty(*shape)
        self.add(name, tensor)
        return tensor
