"""The kinds of weights that GEMMs on a CUDA device read. Each owns its scales; `gemm_table` runs it."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from saccade.kernels.gemm.fp8_linear import fp8_gemm
from saccade.kernels.gemm.int4_linear import Int4Weight, choose_int4
from saccade.kernels.gemm.skinny import Config, choose
from saccade.kernels.ops.scaled_weight import block_of
from saccade.models.cuda.gemm_self_tests import (
    can_multiply_int4,
    can_split_k_fp8,
    can_split_k_int4,
    can_unpack_int4,
)
from saccade.models.layers.linear import Linear


class Plain:
    """In the model's dtype: [outputs, inputs]."""

    scales: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.gelu = False  # of gate and up: what gates is GELU by tanh, not SiLU
        self.outputs, self.inputs = weight.shape

    @property
    def key(self) -> tuple[object, ...]:
        """What a choice depends on, beside the rows."""
        return type(self), self.weight.shape, self.bias is None, self.gelu

    @property
    def act(self) -> str:
        """Of gate and up."""
        return ("silu_and_mul", "gelu_and_mul")[self.gelu]

    def gated_by(self, gelu: bool) -> Plain:
        """The same weight, of gate and up."""
        other = copy(self)
        other.gelu = gelu
        return other

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs

    def gate_config(self, rows: int) -> Config | None:
        """The launch of gate and up at once; None where cuBLAS is better, or there is a bias."""
        if self.bias is not None:
            return None
        is_scaled = self.scales is not None
        return choose(rows, self.outputs // 2, self.inputs, self.weight.dtype, gated=True, scaled=is_scaled)

    @staticmethod
    def decide(device: torch.device, dtype: torch.dtype) -> bool:
        """Decides the kernels of this kind; whether split-K reads it up to 64 rows, however large it is."""
        return False


class Fp8Blocks(Plain):
    """In float8, with a scale for each block of 128 x 128 (`fp8_weights`)."""

    in_blocks = True

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear.weight, linear.bias)
        assert linear.scales is not None
        self.scales: Tensor = linear.scales
        self.dequantized = linear.dequantized

    @staticmethod
    def decide(device: torch.device, dtype: torch.dtype) -> bool:
        for in_blocks in (False, True):
            fp8_gemm(device, in_blocks)
        can_split_k_fp8(device)
        return True


class Fp8PerRow(Fp8Blocks):
    """In float8, with a scale for each row of the weight."""

    in_blocks = False


class Int4(Plain):
    """Packed, with scales of groups of columns (`int4_weights`)."""

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear.weight, linear.bias)
        assert linear.groups is not None
        self.packed = Int4Weight(linear.weight, linear.groups.scales, linear.groups.zeros)
        self.order = linear.groups.order
        self.inputs = self.packed.inputs

    def gate_config(self, rows: int) -> Config | None:
        if self.bias is not None:
            return None
        return choose_int4(rows, self.outputs // 2, self.inputs, gated=True)

    def in_order(self, x: Tensor) -> Tensor:
        """Columns of x as those of the weight are."""
        return x if self.order is None else x.index_select(1, self.order)

    @staticmethod
    def decide(device: torch.device, dtype: torch.dtype) -> bool:
        can_multiply_int4(device, dtype)
        can_unpack_int4(device, dtype)
        return can_split_k_int4(device, dtype)


def weight_of(linear: Linear) -> Plain:
    if linear.groups is not None:
        return Int4(linear)
    if linear.scales is not None:
        return Fp8Blocks(linear) if block_of(linear.weight, linear.scales) else Fp8PerRow(linear)
    return Plain(linear.weight, linear.bias)
