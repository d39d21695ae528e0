"""Which kernels run the GEMMs of a decoder's layer: a table by operation and kind of weight. Knows no layers.

    operation   result
    WHOLE       [T, outputs], in `out` if given
    ADDED       what the residual gets, or split-K partials of it: [splits, T, outputs]
    GATED       silu(gate) * up: [T, outputs / 2]

Of the ways for an operation and a kind of weight, the first that suits is taken. `SKINNY` has GEMMs that norm
x and add the residual; `LARGE` has those between which others do that; `split_k_table` adds ways to these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels.gemm.fp8_linear import fp8_linear, has_fp8_gemm
from saccade.kernels.gemm.int4_linear import MAX_INT4_ROWS, Norm, int4_linear
from saccade.kernels.gemm.linear_act import linear_act
from saccade.kernels.gemm.skinny import (
    MAX_SCALED_ROWS,
    SplitWorkspace,
    gated_linear,
    library_linear,
    norm_gated_linear,
    norm_linear,
    skinny_linear,
)
from saccade.kernels.ops.norm import rms_norm, silu_and_mul, silu_and_mul_fp8
from saccade.kernels.ops.quantize_rows import Fp8Rows
from saccade.kernels.ops.unpack_int4 import unpack_int4, unpack_without_kernel
from saccade.models.cuda.gemm_self_tests import can_multiply_int4, can_unpack_int4
from saccade.models.cuda.gemm_weights import Fp8Blocks, Fp8PerRow, Int4, Plain
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear

logger = logging.getLogger(__name__)

WHOLE = "whole"
ADDED = "added"
GATED = "gated"


class Inputs(NamedTuple):
    """What x is in all GEMMs."""

    rows: int
    dtype: torch.dtype
    device: torch.device


class Way(NamedTuple):
    kinds: tuple[type[Plain], ...]
    suits: Callable[[Any, int, Inputs], bool]  # takes the weight and outputs, of a gate and as many of `up`
    run: Callable[..., Any]  # takes `Launches`, the weight, x, and what the operation needs
    reason: str  # for the log
    in_fp8: bool = False  # x is `Fp8Rows`, which the kernel before has written
    bias: bool = True  # the weight may have one


Table = Mapping[str, Sequence[Way]]  # by operation
Out = Tensor | None


class Launches:
    """Runs GEMMs by a table. Each choice is made once.

    A result in `scratch` is valid until the next one is written there.
    """

    def __init__(
        self,
        table: Table,
        x: Inputs,
        workspace: SplitWorkspace,
        weights: Mapping[Linear, Plain],
        *,
        scratch: Tensor | None = None,
        in_parts: bool = False,
    ) -> None:
        self.workspace = workspace
        self.weights = weights
        self.in_parts = in_parts  # attention accepts queries, keys and values as split-K partials
        self._table = table
        self._x = x
        self._scratch = scratch
        self._ways: dict[tuple[object, ...], Way | None] = {}

    def way(self, operation: str, weight: Plain, in_fp8: bool = False) -> Way | None:
        """How the weight is multiplied; None: not by x in float8."""
        key = (operation, weight.key, in_fp8)
        if key not in self._ways:
            self._ways[key] = self._choose(operation, weight, in_fp8)
        return self._ways[key]

    def run(self, operation: str, weight: Plain, x: Tensor | Fp8Rows, **options: Any) -> Any:
        in_fp8 = isinstance(x, Fp8Rows)
        way = self._ways.get((operation, weight.key, in_fp8)) or self.way(operation, weight, in_fp8)
        assert way is not None, (operation, weight.key)
        return way.run(self, weight, x, **options)

    def both(self, linear: Linear, beside: Linear | None) -> list[Plain]:
        first = self.weights[linear]
        return [first] if beside is None else [first, self.weights[beside]]

    def side_by_side(
        self, weights: Sequence[Plain], x: Tensor | Fp8Rows, like: Tensor, **options: Any
    ) -> Tensor:
        """[T, outputs of all]: each GEMM writes its columns of the rows."""
        if len(weights) == 1:
            out = self.scratch(len(like), weights[0].outputs)
            return self.run(WHOLE, weights[0], x, out=out, **options)  # type: ignore[no-any-return]
        widths = [weight.outputs for weight in weights]
        out = self.scratch(len(like), sum(widths))
        out = like.new_empty(len(like), sum(widths)) if out is None else out
        for weight, columns in zip(weights, torch.split(out, widths, dim=1), strict=True):
            self.run(WHOLE, weight, x, out=columns, **options)
        return out

    def scratch(self, rows: int, outputs: int) -> Tensor | None:
        return None if self._scratch is None else self._scratch[: rows * outputs].view(rows, outputs)

    def _choose(self, operation: str, weight: Plain, in_fp8: bool) -> Way | None:
        outputs = weight.outputs // 2 if operation == GATED else weight.outputs
        for way in self._table[operation]:
            if way.in_fp8 != in_fp8 or type(weight) not in way.kinds:
                continue
            if (way.bias or weight.bias is None) and way.suits(weight, outputs, self._x):
                logger.debug("%d rows, %s, %s: %s", self._x.rows, operation, weight.key, way.reason)
                return way
        return None


# --- which weights and rows suit ---


def _any(weight: Plain, outputs: int, x: Inputs) -> bool:
    return True


def _multiplies_fp8(weight: Fp8Blocks, outputs: int, x: Inputs) -> bool:
    """cuBLAS does, with a scale for 128 columns of x, which norm and gate can write."""
    return x.rows > MAX_SCALED_ROWS and has_fp8_gemm(weight.weight, x.dtype, in_blocks=True)


def _multiplies_and_gates_fp8(weight: Fp8Blocks, outputs: int, x: Inputs) -> bool:
    return not weight.gelu and _multiplies_fp8(weight, outputs, x)


def _gates_int4(weight: Int4, outputs: int, x: Inputs) -> bool:
    return not weight.gelu and _reads_int4(weight, outputs, x)


def _reads_fp8(weight: Fp8Blocks, outputs: int, x: Inputs) -> bool:
    if x.rows <= MAX_SCALED_ROWS:
        return True
    return has_fp8_gemm(weight.weight, x.dtype, in_blocks=weight.in_blocks)


def _reads_int4(weight: Int4, outputs: int, x: Inputs) -> bool:
    return x.rows <= MAX_INT4_ROWS and can_multiply_int4(x.device, x.dtype)


def _unpacks(weight: Int4, outputs: int, x: Inputs) -> bool:
    return not _reads_int4(weight, outputs, x)


def _gates(weight: Plain, outputs: int, x: Inputs) -> bool:
    return weight.gate_config(x.rows) is not None


# --- what runs ---


def _norm_whole(gemms: Launches, weight: Plain, x: Tensor, norm: RMSNorm, out: Tensor | None) -> Tensor:
    args = (x, norm.weight, norm.eps, weight.weight, weight.bias)
    return norm_linear(*args, scales=weight.scales, workspace=gemms.workspace, out=out)


def _norm_gated(gemms: Launches, weight: Plain, x: Tensor, norm: RMSNorm) -> Tensor:
    return norm_gated_linear(x, norm.weight, norm.eps, weight.weight, scales=weight.scales)


def _whole(gemms: Launches, weight: Plain, x: Tensor, out: Out = None, residual: Out = None) -> Tensor:
    args = (x, weight.weight, weight.bias, residual)
    return skinny_linear(*args, scales=weight.scales, workspace=gemms.workspace, out=out)


def _dequantized(gemms: Launches, weight: Fp8Blocks, x: Tensor, out: Out = None) -> Tensor:
    return skinny_linear(x, weight.dequantized(x.dtype), weight.bias, workspace=gemms.workspace, out=out)


def _fp8(gemms: Launches, weight: Fp8Blocks, x: Fp8Rows, out: Out = None) -> Tensor:
    return fp8_linear(x, weight.weight, weight.scales, weight.bias, out)


def _int4(
    gemms: Launches,
    weight: Int4,
    x: Tensor,
    out: Out = None,
    residual: Out = None,
    norm: RMSNorm | None = None,
) -> Tensor:
    return _packed(gemms, weight, x, norm, residual=residual, out=out)


def _int4_gated(gemms: Launches, weight: Int4, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
    return _packed(gemms, weight, x, norm, gated=True)


def _packed(gemms: Launches, weight: Int4, x: Tensor, norm: RMSNorm | None, **options: Any) -> Tensor:
    fused = None
    if norm is not None:
        if weight.order is None:
            fused = Norm(norm.weight, norm.eps)
        else:
            x = rms_norm(x, norm.weight, norm.eps)
    x = weight.in_order(x)
    return int4_linear(x, weight.packed, weight.bias, norm=fused, workspace=gemms.workspace, **options)


def _unpacked(
    gemms: Launches,
    weight: Int4,
    x: Tensor,
    out: Out = None,
    residual: Out = None,
    norm: RMSNorm | None = None,
) -> Tensor:
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    wide = _unpack(gemms, weight)
    rows = library_linear(weight.in_order(x), wide, weight.bias, out)
    return rows if residual is None else rows.add_(residual)


def _unpacked_norm_gated(gemms: Launches, weight: Int4, x: Tensor, norm: RMSNorm) -> Tensor:
    return silu_and_mul(_unpacked(gemms, weight, x, norm=norm))


def _unpack(gemms: Launches, weight: Int4) -> Tensor:
    """[outputs, inputs], columns as they are packed; valid until the next one.

    The next kernel must wait for it: not one that reads weights before the previous kernel has ended.
    """
    assert gemms.workspace.unpacked is not None
    out = gemms.workspace.unpacked[: weight.elements].view(-1, weight.inputs)
    unpack = unpack_int4 if can_unpack_int4(out.device, out.dtype) else unpack_without_kernel
    return unpack(*weight.packed, out)


def _gated(gemms: Launches, weight: Plain, x: Tensor) -> Tensor:
    return gated_linear(x, weight.weight, scales=weight.scales, gelu=weight.gelu)


def _gated_fp8(gemms: Launches, weight: Fp8Blocks, x: Fp8Rows) -> Fp8Rows:
    return silu_and_mul_fp8(_fp8(gemms, weight, x, gemms.scratch(x.rows, weight.outputs)))


def _gated_act(gemms: Launches, weight: Plain, x: Tensor) -> Tensor:
    out = gemms.scratch(len(x), weight.outputs // 2)
    gated = linear_act(x, weight.weight, weight.bias, weight.act, out)
    return _gated_after(gemms, weight, x) if gated is None else gated


def _gated_unpacked(gemms: Launches, weight: Int4, x: Tensor) -> Tensor:
    wide = _unpack(gemms, weight)
    x = weight.in_order(x)
    gated = linear_act(x, wide, weight.bias, weight.act, gemms.scratch(len(x), weight.outputs // 2))
    if gated is not None:
        return gated
    out = gemms.scratch(len(x), weight.outputs)
    wide = library_linear(x, wide, weight.bias, out)
    return silu_and_mul(wide, over_gate=out is not None, gelu=weight.gelu)


def _gated_after(gemms: Launches, weight: Plain, x: Tensor) -> Tensor:
    out = gemms.scratch(len(x), weight.outputs)
    wide = gemms.run(WHOLE, weight, x, out=out)
    return silu_and_mul(wide, over_gate=out is not None, gelu=weight.gelu)


# --- the tables ---

PLAIN = (Plain,)
FP8 = (Fp8Blocks, Fp8PerRow)
INT4 = (Int4,)
_UNPACKED = Way(INT4, _any, _unpacked, "INT4 is unpacked for cuBLAS")

SKINNY: Table = {
    WHOLE: (
        Way(PLAIN + FP8, _any, _norm_whole, "one launch with the norm"),
        Way(INT4, _reads_int4, _int4, "one launch with the norm, that reads INT4"),
        _UNPACKED,
    ),
    ADDED: (
        Way(PLAIN + FP8, _any, _whole, "one launch with the residual"),
        Way(INT4, _reads_int4, _int4, "one launch with the residual, that reads INT4"),
        _UNPACKED,
    ),
    GATED: (
        Way(PLAIN + FP8, _any, _norm_gated, "one launch with norm and gate"),
        Way(INT4, _reads_int4, _int4_gated, "one launch with norm and gate, that reads INT4"),
        Way(INT4, _any, _unpacked_norm_gated, "INT4 is unpacked for cuBLAS"),
    ),
}

_LARGE = (
    Way(FP8[:1], _multiplies_fp8, _fp8, "cuBLAS reads float8 on both sides", in_fp8=True),
    Way(PLAIN, _any, _whole, "`skinny` where it is faster, else cuBLAS"),
    Way(FP8, _reads_fp8, _whole, "`skinny` reads float8, or cuBLAS after x is quantised"),
    Way(FP8, _any, _dequantized, "no kernel reads float8: dequantised for cuBLAS"),
    Way(INT4, _reads_int4, _int4, "a kernel reads INT4"),
    _UNPACKED,
)

LARGE: Table = {
    WHOLE: _LARGE,
    ADDED: _LARGE,
    GATED: (
        Way(
            FP8[:1],
            _multiplies_and_gates_fp8,
            _gated_fp8,
            "cuBLAS, float8 by float8",
            in_fp8=True,
            bias=False,
        ),
        Way(PLAIN + FP8, _gates, _gated, "`skinny` has the gate"),
        Way(INT4, _gates_int4, _int4_gated, "the kernel that reads INT4 has the gate", bias=False),
        Way(PLAIN, _any, _gated_act, "`linear_act` where it is faster, else two launches"),
        Way(INT4, _unpacks, _gated_unpacked, "INT4 is unpacked, then as if it were plain"),
        Way(FP8 + INT4, _any, _gated_after, "two launches"),
    ),
}
