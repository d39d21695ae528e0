"""A model's parameters by name, allocated before weights are loaded into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.models.fp8_weights import Fp8Weights
from saccade.models.int4_weights import GroupScales, Int4Weights

Scales = Tensor | GroupScales
"""Scales of a weight in float8, or in INT4."""


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

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        left_out: str | None = None,
        quantized: Fp8Weights | Int4Weights | None = None,  # weights that stay so
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.quantized = quantized
        self._left_out = left_out
        self.targets: dict[str, Tensor] = {}
        self.scales: dict[str, Scales] = {}  # of targets and wholes that are quantised
        self.wholes: dict[str, Whole] = {}
        self.linears: list[Packable] = []
        self._prefix = ""

    def within(self, name: str | int) -> Parameters:
        """The same collection, with this level added to the prefix."""
        inner = Parameters(self.dtype, self.device, quantized=self.quantized)
        if name == self._left_out:
            inner.device = torch.device("meta")
        inner.targets = self.targets
        inner.scales = self.scales
        inner.wholes = self.wholes
        inner.linears = self.linears
        inner._prefix = f"{self._prefix}{name}."
        return inner

    def each(self, name: str, count: int) -> list[Parameters]:
        """The parameters of so many layers: the level `name.0`, `name.1` and so on."""
        return [self.within(name).within(index) for index in range(count)]

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def keeps_fp8(self, parts: Mapping[str, int], inputs: int) -> bool:
        """Whether the weight of one GEMM over parts of these names and rows stays in float8."""
        return isinstance(self.quantized, Fp8Weights) and self.quantized.keep(self._full_names(parts), inputs)

    def is_kept(self, name: str) -> bool:
        """Whether this weight is quantised, and can stay so by itself."""
        return self.quantized is not None and self.quantized.has(self._prefix + name)

    def are_kept_alike(self, *names: str) -> bool:
        """Whether these weights stay quantised, in the same way."""
        return self.quantized is not None and self.quantized.are_alike(
            *(self._prefix + name for name in names)
        )

    def empty_weight(self, parts: Mapping[str, int], *shape: int) -> tuple[Tensor, Scales | None]:
        """The weight of a GEMM over these parts and rows. One that stays quantised comes with scales."""
        if self.quantized is not None:
            weight = self.quantized.empty(self._full_names(parts), shape, self.device)
            if weight is not None:
                return weight
        return self.empty(*shape), None

    def _full_names(self, parts: Mapping[str, int]) -> dict[str, int]:
        return {self._prefix + name: size for name, size in parts.items()}

    def add(self, name: str, tensor: Tensor, scales: Scales | None = None) -> None:
        self.targets[self._prefix + name] = tensor
        if scales is not None:
            self.scales[self._prefix + name] = scales

    def remove(self, name: str) -> None:
        self.targets.pop(self._prefix + name)
        self.scales.pop(self._prefix + name, None)

    def add_whole(
        self, name: str, tensor: Tensor, parts: Sequence[str], scales: Scales | None = None
    ) -> None:
        self.wholes[self._prefix + name] = Whole(tensor, frozenset(self._prefix + part for part in parts))
        if scales is not None:
            self.scales[self._prefix + name] = scales

    def give_up_names(self) -> None:
        """Once weights are loaded and `encoder_weights` was asked: layers alone hold the tensors then."""
        self.targets.clear()
        self.scales.clear()
        self.wholes.clear()

    def new(self, name: str, *shape: int) -> Tensor:
        tensor = self.empty(*shape)
        self.add(name, tensor)
        return tensor
