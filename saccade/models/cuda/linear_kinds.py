"""What a layer's weight is, plain, in float8 or packed in INT4, and which kernels take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.kernels.gemm.fp8_linear import has_fp8_gemm
from saccade.kernels.gemm.int4_linear import choose_int4
from saccade.kernels.gemm.skinny import MAX_ELEMENTS, MAX_ROWS, MAX_SCALED_ROWS, Config, choose
from saccade.kernels.ops.scaled_weight import block_of
from saccade.models.cuda.int4_gemms import elements_of, is_packed
from saccade.models.layers.linear import Linear
from saccade.models.layers.mlp import GatedMLP


def scales_of(linear: Linear) -> Tensor | None:
    """PyTorch's own layers, which `gated` takes too, have none."""
    return getattr(linear, "scales", None)


def scaled(linear: Linear) -> tuple[Tensor, Tensor]:
    """A weight in float8 and its scales."""
    assert linear.scales is not None
    return linear.weight, linear.scales


def reads_fp8(rows: Tensor, linear: Linear) -> bool:
    """Whether a kernel multiplies so many rows with its weight in float8."""
    in_blocks = block_of(linear.weight, linear.scales) > 0
    return len(rows) <= MAX_SCALED_ROWS or has_fp8_gemm(linear.weight, rows.dtype, in_blocks=in_blocks)


def is_large(rows: Tensor, linear: Linear) -> bool:
    """Whether it has too many elements for so many rows. Matters where layers in float8 are beside others."""
    limit = MAX_SCALED_ROWS if scales_of(linear) is not None else MAX_ROWS
    return elements_of(linear) > MAX_ELEMENTS and len(rows) > limit


def gated_config(mlp: GatedMLP, rows: int) -> Config | None:
    """The config of gate and up in one launch; None where cuBLAS is better, or there is a bias."""
    weight = mlp.gate_up.weight
    if mlp.gate_up.bias is not None:
        return None
    if is_packed(mlp.gate_up):
        return choose_int4(rows, len(weight) // 2, mlp.gate_up.inputs, gated=True)
    scaled = scales_of(mlp.gate_up) is not None
    return choose(rows, len(weight) // 2, weight.shape[1], weight.dtype, gated=True, scaled=scaled)


def both(linear: Linear, beside: Linear | None) -> list[Linear]:
    return [linear] if beside is None else [linear, beside]


def widths(linears: Sequence[Linear]) -> list[int]:
    return [len(linear.weight) for linear in linears]


def side_by_side(
    multiply: Callable[[Linear, Tensor | None], Tensor],
    linears: Sequence[Linear],
    rows: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """[T, outputs of all], in `out` if given: each GEMM writes its columns of the rows."""
    if len(linears) == 1:
        return multiply(linears[0], out)
    counts = widths(linears)
    out = rows.new_empty(len(rows), sum(counts)) if out is None else out
    for linear, part in zip(linears, torch.split(out, counts, dim=1), strict=True):
        multiply(linear, part)
    return out
