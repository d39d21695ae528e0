"""The GEMMs of few rows on Hopper GPUs, by split-K: the next kernel adds up their partial sums."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.gemm.skinny import SplitWorkspace
from saccade.kernels.ops.quantize_rows import Fp8Rows, quantize_rows
from saccade.kernels.ops.scaled_weight import BLOCK
from saccade.models.cuda.int4_gemms import in_order, is_packed, own_weight
from saccade.models.cuda.large_gemms import LargeGemms
from saccade.models.cuda.linear_kinds import both, is_large, scaled, scales_of
from saccade.models.cuda.residual import Residual
from saccade.models.cuda.split_k import can_split_k_fp8, can_split_k_int4
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.mlp import GatedMLP


class SplitKGemms(LargeGemms):
    def __init__(self, workspace: SplitWorkspace, in_parts: bool) -> None:
        # Gluon is experimental: only where used
        from saccade.kernels.gemm import hopper_fp8_split_k, hopper_int4_split_k, hopper_split_k

        super().__init__(workspace, None)
        self.in_parts = in_parts
        self._bf16, self._fp8, self._int4 = hopper_split_k, hopper_fp8_split_k, hopper_int4_split_k

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        if not (in_parts and self.in_parts):
            normed, x = self._norm(x, norm)
            return self._projected(normed, both(linear, beside), normed), x
        assert beside is None, "split-K partials of two GEMMs would be two tensors"
        rows, x = self._norm_for(x, norm, [linear])
        return self._added(rows, linear), x

    def _takes_fp8(self, x: Tensor, linear: Linear) -> bool:
        is_scaled = scales_of(linear) is not None and x.dtype == torch.bfloat16
        return is_scaled and self._fp8.suits(len(x), *linear.weight.shape) and can_split_k_fp8(x.device)

    def _takes_int4(self, x: Tensor, linear: Linear, *, gated: bool = False) -> bool:
        if not is_packed(linear):
            return False
        outputs = len(linear.weight) // (2 if gated else 1)
        return self._int4.suits(len(x), outputs, linear.inputs) and can_split_k_int4(x.device, x.dtype)

    def _linear(self, rows: Tensor | Fp8Rows, linear: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(rows, Fp8Rows) or not self._fp8.fills_device(len(linear.weight)):
            return super()._linear(rows, linear, out)
        takes_int4 = self._takes_int4(rows, linear)
        if not takes_int4 and (len(rows) == 1 or not self._takes_fp8(rows, linear)):
            return super()._linear(rows, linear, out)
        out = rows.new_empty(len(rows), len(linear.weight)) if out is None else out
        if takes_int4:
            return self._int4.int4_linear_into(in_order(rows, linear), own_weight(linear), linear.bias, out)
        return self._fp8.fp8_linear_into(quantize_rows(rows, BLOCK), *scaled(linear), linear.bias, out)

    def _added(self, rows: Tensor | Fp8Rows, linear: Linear) -> Tensor:
        if isinstance(rows, Fp8Rows):
            return self._added_fp8(rows, linear)
        if self._takes_int4(rows, linear):
            return self._added_int4(rows, linear)
        weight = linear.weight
        outputs, inputs = weight.shape
        is_suited = self._bf16.suits(len(rows), outputs, inputs, rows.dtype)
        if is_packed(linear) or not is_suited or is_large(rows, linear):
            return self._linear(rows, linear)
        config = self._bf16.choose_split_k(len(rows), outputs, inputs, weight.itemsize)
        return self._bf16.split_k_linear(rows, weight, linear.bias, config, scales_of(linear))

    def _added_fp8(self, rows: Fp8Rows, linear: Linear) -> Tensor:
        config = self._fp8.choose_split_k(*linear.weight.shape)
        return self._fp8.fp8_split_k_linear(rows, *scaled(linear), linear.bias, config)

    def _added_int4(self, rows: Tensor, linear: Linear) -> Tensor:
        own = own_weight(linear)
        config = self._int4.choose_split_k(len(rows), len(own.weight), own.inputs, own.group)
        return self._int4.int4_split_k_linear(in_order(rows, linear), own, linear.bias, config)

    def _gated_fp8(self, rows: Fp8Rows, mlp: GatedMLP) -> Fp8Rows:
        config = self._fp8.choose_gated(rows.rows)
        return self._fp8.fp8_split_k_gated_linear(rows, *scaled(mlp.gate_up), config)

    def _gated(self, rows: Tensor, mlp: GatedMLP) -> Tensor:
        weight = mlp.gate_up.weight
        if mlp.gate_up.bias is None and self._takes_int4(rows, mlp.gate_up, gated=True):
            own, config = own_weight(mlp.gate_up), self._int4.choose_gated(len(rows))
            return self._int4.int4_split_k_gated_linear(in_order(rows, mlp.gate_up), own, config)
        is_suited = self._bf16.suits(len(rows), len(weight) // 2, weight.shape[1], rows.dtype)
        is_suited = is_suited and not is_packed(mlp.gate_up)
        if mlp.gate_up.bias is not None or not is_suited or is_large(rows, mlp.gate_up):
            return super()._gated(rows, mlp)
        config = self._bf16.choose_gated(len(rows), weight.itemsize)
        return self._bf16.split_k_gated_linear(rows, weight, config, scales_of(mlp.gate_up))
