"""The GEMMs of many rows: cuBLAS, or `skinny` where it is faster. The next norm adds the residual."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from saccade.kernels.gemm.fp8_linear import fp8_linear, has_fp8_gemm
from saccade.kernels.gemm.linear_act import linear_act
from saccade.kernels.gemm.skinny import MAX_SCALED_ROWS, Config, SplitWorkspace, gated_linear, skinny_linear
from saccade.kernels.ops.norm import add_rms_norm, norm_fp8, silu_and_mul, silu_and_mul_fp8
from saccade.kernels.ops.quantize_rows import Fp8Rows
from saccade.kernels.ops.scaled_weight import block_of
from saccade.models.cuda.int4_gemms import in_order, is_packed, packed_linear, reads_packed, unpacked
from saccade.models.cuda.linear_kinds import (
    both,
    gated_config,
    reads_fp8,
    scaled,
    scales_of,
    side_by_side,
    widths,
)
from saccade.models.cuda.moe import run_moe
from saccade.models.cuda.residual import Residual
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.mlp import GatedMLP
from saccade.models.layers.moe import MoE


class LargeGemms:
    """A result in `scratch` is valid until the next one is written there."""

    def __init__(self, workspace: SplitWorkspace, scratch: Tensor | None) -> None:
        self.workspace = workspace
        self.scratch = scratch

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        linears = both(linear, beside)
        normed, x = self._norm_for(x, norm, linears)
        return self._projected(normed, linears, x.rows), x

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        return Residual(x.rows, self._added(rows, linear))

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        if isinstance(mlp, MoE):
            assert scales is None, "layers with a gate have no experts"
            normed, x = self._norm(x, norm)
            return Residual(x.rows, run_moe(normed, mlp))
        is_plain = scales is None and mlp.gate_up.bias is None
        rows, x = self._norm_for(x, norm, [mlp.gate_up, mlp.down]) if is_plain else self._norm(x, norm)
        if isinstance(rows, Fp8Rows):
            return Residual(x.rows, self._added(self._gated_fp8(rows, mlp), mlp.down))
        gated = self._gated(rows, mlp)
        return Residual(x.rows, self._added(gated if scales is None else gated.mul_(scales), mlp.down))

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return self._norm(x, decoder.norm, only)[0]

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        return skinny_linear(self.normed(x, decoder), decoder.head, workspace=self.workspace, out=out)

    def _norm(self, x: Residual, norm: RMSNorm, only: Tensor | None = None) -> tuple[Tensor, Residual]:
        if x.added is None:
            return norm(x.rows if only is None else x.rows.index_select(0, only)), x
        normed, rows = add_rms_norm(x.added, x.rows, norm.weight, norm.eps, only)
        return normed, Residual(rows)

    def _norm_for(
        self, x: Residual, norm: RMSNorm, linears: Sequence[Linear]
    ) -> tuple[Tensor | Fp8Rows, Residual]:
        """In float8, if all of these layers read it."""
        if not all(self._takes_fp8(x.rows, linear) for linear in linears):
            return self._norm(x, norm)
        normed, rows = norm_fp8(x.added, x.rows, norm.weight, norm.eps)
        return normed, Residual(rows)

    def _takes_fp8(self, x: Tensor, linear: Linear) -> bool:
        """Whether so many rows are multiplied in float8, with a scale for 128 columns."""
        scales = scales_of(linear)
        if scales is None or len(x) <= MAX_SCALED_ROWS or block_of(linear.weight, scales) == 0:
            return False
        return has_fp8_gemm(linear.weight, x.dtype, in_blocks=True)

    def _projected(self, rows: Tensor | Fp8Rows, linears: Sequence[Linear], like: Tensor) -> Tensor:
        out = self._scratch_for(len(like), sum(widths(linears)))
        return side_by_side(partial(self._linear, rows), linears, like, out)

    def _linear(self, rows: Tensor | Fp8Rows, linear: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(rows, Fp8Rows):
            return fp8_linear(rows, *scaled(linear), linear.bias, out)
        if is_packed(linear):
            return packed_linear(rows, linear, workspace=self.workspace, out=out)
        weight, scales = linear.weight, scales_of(linear)
        if scales is not None and not reads_fp8(rows, linear):
            weight, scales = linear.dequantized(rows.dtype), None
        return skinny_linear(rows, weight, linear.bias, scales=scales, workspace=self.workspace, out=out)

    def _scratch_for(self, rows: int, outputs: int) -> Tensor | None:
        return None if self.scratch is None else self.scratch[: rows * outputs].view(rows, outputs)

    def _added(self, rows: Tensor | Fp8Rows, linear: Linear) -> Tensor:
        """What the next norm adds to the residual."""
        return self._linear(rows, linear)

    def _gated_fp8(self, rows: Fp8Rows, mlp: GatedMLP) -> Fp8Rows:
        scratch = self._scratch_for(rows.rows, len(mlp.gate_up.weight))
        return silu_and_mul_fp8(self._linear(rows, mlp.gate_up, scratch))

    def _gated(self, rows: Tensor, mlp: GatedMLP) -> Tensor:
        """silu(gate) * up: [T, wide]."""
        config = gated_config(mlp, len(rows))
        weight, scales = mlp.gate_up.weight, scales_of(mlp.gate_up)
        if is_packed(mlp.gate_up):
            return self._packed_gated(rows, mlp.gate_up, config)
        if config is not None:
            return gated_linear(rows, weight, scales=scales, config=config)
        if scales is None:
            out = self._scratch_for(len(rows), len(weight) // 2)
            found = linear_act(rows, weight, mlp.gate_up.bias, "silu_and_mul", out)
            if found is not None:
                return found
        scratch = self._scratch_for(len(rows), len(weight))
        return silu_and_mul(self._linear(rows, mlp.gate_up, scratch), over_gate=scratch is not None)

    def _packed_gated(self, rows: Tensor, gate_up: Linear, config: Config | None) -> Tensor:
        if config is not None and reads_packed(rows):
            return packed_linear(rows, gate_up, gated=True, workspace=self.workspace, config=config)
        if not reads_packed(rows):
            weight = unpacked(gate_up, self.workspace)
            out = self._scratch_for(len(rows), len(weight) // 2)
            found = linear_act(in_order(rows, gate_up), weight, gate_up.bias, "silu_and_mul", out)
            if found is not None:
                return found
        scratch = self._scratch_for(len(rows), len(gate_up.weight))
        return silu_and_mul(self._linear(rows, gate_up, scratch), over_gate=scratch is not None)
