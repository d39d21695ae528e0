"""What lies between two GEMMs of a decoder on a CUDA device, and what every way to run them offers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from saccade.kernels.ops.norm import Added
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.mlp import GatedMLP
from saccade.models.layers.moe import MoE
from saccade.models.layers.sandwich import NormedSum


class Residual(NamedTuple):
    """The residual between two GEMMs."""

    rows: Tensor  # [T, H]
    added: Tensor | None = None  # [T, H] or split-K partials [splits, T, H]: to be added by the next norm
    how: Added | None = None  # it is added; None: as it is

    @property
    def addend(self) -> Tensor:
        """What takes one more term [T, H], in place."""
        if self.added is None or self.how is not None:
            return self.rows
        return self.added.view(-1, *self.rows.shape)[0]

    def added_by(self, layer: Any, name: str) -> Residual:
        """As the layer says, if it does."""
        layer_sum: NormedSum | None = getattr(layer, name, None)
        if layer_sum is None:
            return self
        return self._replace(how=Added(layer_sum.norm.weight, layer_sum.norm.eps, layer_sum.scale))

    def rows_at(self, only: Tensor | None) -> Tensor:
        return self.rows if only is None else self.rows.index_select(0, only)


class Gemms(Protocol):
    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        """The projection [T, outputs] of the normed residual, and the residual.

        The outputs of `beside` follow those of `linear` in each row. With `in_parts`, here and in
        `DecoderGemms.for_rows`, it may be split-K partials [splits, T, outputs].
        """
        ...

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        """The residual with the projection of `rows` added."""
        ...

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        """The residual with the MLP's result added; `scales`, [T, 1], multiply its rows."""
        ...

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        """The input of the LM head: [T, H], or of the rows `only` (int32 [W]): [W, H]."""
        ...

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        """[T, vocabulary], in the model's dtype: rounding does not change which one is largest.

        `FusedDecoder.finish` follows.
        """
        ...
