"""The GEMMs of one row, or of a few with small weights: norm, gate and residual are part of them."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.gemm.skinny import SplitWorkspace, norm_gated_linear, norm_linear, skinny_linear
from saccade.kernels.ops.norm import rms_norm
from saccade.models.cuda.int4_gemms import is_packed, packed_linear
from saccade.models.cuda.linear_kinds import both, scales_of, side_by_side
from saccade.models.cuda.moe import run_moe
from saccade.models.cuda.residual import Residual
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.mlp import GatedMLP
from saccade.models.layers.moe import MoE


class SkinnyGemms:
    def __init__(self, workspace: SplitWorkspace) -> None:
        self.workspace = workspace

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        def multiply(one: Linear, out: Tensor | None) -> Tensor:
            if is_packed(one):
                return packed_linear(x.rows, one, norm=norm, workspace=self.workspace, out=out)
            own = (one.weight, one.bias)
            given = (x.rows, norm.weight, norm.eps, *own)
            return norm_linear(*given, scales=scales_of(one), workspace=self.workspace, out=out)

        return side_by_side(multiply, both(linear, beside), x.rows), x

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        if is_packed(linear):
            return Residual(packed_linear(rows, linear, x.rows, workspace=self.workspace))
        own = (linear.weight, linear.bias)
        return Residual(skinny_linear(rows, *own, x.rows, scales=scales_of(linear), workspace=self.workspace))

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        if isinstance(mlp, MoE):
            return Residual(run_moe(rms_norm(x.rows, norm.weight, norm.eps), mlp, x.rows))
        gate_up = mlp.gate_up
        if is_packed(gate_up):
            gated = packed_linear(x.rows, gate_up, norm=norm, gated=True, workspace=self.workspace)
        else:
            own = (norm.weight, norm.eps, gate_up.weight)
            gated = norm_gated_linear(x.rows, *own, scales=scales_of(gate_up))
        return self.add(gated if scales is None else gated.mul_(scales), mlp.down, x)

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return decoder.norm(x.rows if only is None else x.rows.index_select(0, only))

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        norm = decoder.norm
        return norm_linear(x.rows, norm.weight, norm.eps, decoder.head, workspace=self.workspace, out=out)
