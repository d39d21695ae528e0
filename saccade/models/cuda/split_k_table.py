"""Ways to run GEMMs of few rows on Hopper GPUs, by split-K: the next kernel adds up the partial sums."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.gemm import hopper_fp8_split_k, hopper_int4_split_k, hopper_split_k
from saccade.kernels.gemm.skinny import MAX_ELEMENTS, MAX_ROWS, MAX_SCALED_ROWS
from saccade.kernels.ops.quantize_rows import Fp8Rows, quantize_rows
from saccade.kernels.ops.scaled_weight import BLOCK
from saccade.models.cuda.gemm_self_tests import can_split_k_fp8, can_split_k_int4
from saccade.models.cuda.gemm_table import (
    ADDED,
    FP8,
    GATED,
    INT4,
    LARGE,
    PLAIN,
    WHOLE,
    Inputs,
    Launches,
    Out,
    Table,
    Way,
)
from saccade.models.cuda.gemm_weights import Fp8Blocks, Int4, Plain

# --- which weights and rows suit ---


def _suits(weight: Plain, outputs: int, x: Inputs) -> bool:
    """Layers in float8 may be beside others that are too large for so many rows."""
    limit = MAX_ROWS if weight.scales is None else MAX_SCALED_ROWS
    if weight.elements > MAX_ELEMENTS and x.rows > limit:
        return False
    return hopper_split_k.suits(x.rows, outputs, weight.inputs, x.dtype)


def _suits_fp8(weight: Fp8Blocks, outputs: int, x: Inputs) -> bool:
    if x.dtype != torch.bfloat16:
        return False
    is_whole = hopper_fp8_split_k.suits(x.rows, weight.outputs, weight.inputs)
    return is_whole and can_split_k_fp8(x.device)


def _suits_int4(weight: Int4, outputs: int, x: Inputs) -> bool:
    is_whole = hopper_int4_split_k.suits(x.rows, outputs, weight.inputs)
    return is_whole and can_split_k_int4(x.device, x.dtype)


def _gates_fp8(weight: Fp8Blocks, outputs: int, x: Inputs) -> bool:
    return not weight.gelu and _suits_fp8(weight, outputs, x)


def _gates_int4(weight: Int4, outputs: int, x: Inputs) -> bool:
    return not weight.gelu and _suits_int4(weight, outputs, x)


def _fills_by_fp8(weight: Fp8Blocks, outputs: int, x: Inputs) -> bool:
    return x.rows != 1 and hopper_fp8_split_k.fills_device(outputs) and _suits_fp8(weight, outputs, x)


def _fills_by_int4(weight: Int4, outputs: int, x: Inputs) -> bool:
    return hopper_fp8_split_k.fills_device(outputs) and _suits_int4(weight, outputs, x)


# --- what runs ---


def _added(gemms: Launches, weight: Plain, x: Tensor) -> Tensor:
    config = hopper_split_k.choose_split_k(len(x), weight.outputs, weight.inputs, weight.weight.itemsize)
    return hopper_split_k.split_k_linear(x, weight.weight, weight.bias, config, weight.scales)


def _gated(gemms: Launches, weight: Plain, x: Tensor) -> Tensor:
    config = hopper_split_k.choose_gated(len(x), weight.weight.itemsize)
    return hopper_split_k.split_k_gated_linear(x, weight.weight, config, weight.scales, gelu=weight.gelu)


def _whole_fp8(gemms: Launches, weight: Fp8Blocks, x: Tensor, out: Out = None) -> Tensor:
    out = x.new_empty(len(x), weight.outputs) if out is None else out
    rows = quantize_rows(x, BLOCK)
    return hopper_fp8_split_k.fp8_linear_into(rows, weight.weight, weight.scales, weight.bias, out)


def _added_fp8(gemms: Launches, weight: Fp8Blocks, x: Fp8Rows) -> Tensor:
    config = hopper_fp8_split_k.choose_split_k(weight.outputs, weight.inputs)
    return hopper_fp8_split_k.fp8_split_k_linear(x, weight.weight, weight.scales, weight.bias, config)


def _gated_fp8(gemms: Launches, weight: Fp8Blocks, x: Fp8Rows) -> Fp8Rows:
    config = hopper_fp8_split_k.choose_gated(x.rows)
    return hopper_fp8_split_k.fp8_split_k_gated_linear(x, weight.weight, weight.scales, config)


def _whole_int4(gemms: Launches, weight: Int4, x: Tensor, out: Out = None) -> Tensor:
    out = x.new_empty(len(x), weight.outputs) if out is None else out
    return hopper_int4_split_k.int4_linear_into(weight.in_order(x), weight.packed, weight.bias, out)


def _added_int4(gemms: Launches, weight: Int4, x: Tensor) -> Tensor:
    packed = weight.packed
    config = hopper_int4_split_k.choose_split_k(len(x), weight.outputs, weight.inputs, packed.group)
    return hopper_int4_split_k.int4_split_k_linear(weight.in_order(x), packed, weight.bias, config)


def _gated_int4(gemms: Launches, weight: Int4, x: Tensor) -> Tensor:
    config = hopper_int4_split_k.choose_gated(len(x))
    return hopper_int4_split_k.int4_split_k_gated_linear(weight.in_order(x), weight.packed, config)


# --- the table ---

_ON_ALL_GPUS = {
    operation: [way for way in LARGE[operation] if not way.in_fp8] for operation in (WHOLE, GATED)
}
_WHOLE = (
    Way(FP8, _fills_by_fp8, _whole_fp8, "float8 by float8, without splits: many outputs fill the GPU"),
    Way(INT4, _fills_by_int4, _whole_int4, "INT4, without splits: many outputs fill the GPU"),
    *_ON_ALL_GPUS[WHOLE],
)

SPLIT_K: Table = {
    WHOLE: _WHOLE,
    ADDED: (
        Way(FP8, _suits_fp8, _added_fp8, "split-K, float8 by float8", in_fp8=True),
        Way(INT4, _suits_int4, _added_int4, "split-K reads INT4"),
        Way(PLAIN + FP8, _suits, _added, "split-K; float8 is converted"),
        *_WHOLE,
    ),
    GATED: (
        Way(FP8, _gates_fp8, _gated_fp8, "float8 by float8, with the gate", in_fp8=True, bias=False),
        Way(INT4, _gates_int4, _gated_int4, "INT4, with the gate", bias=False),
        Way(PLAIN + FP8, _suits, _gated, "with the gate; float8 is converted", bias=False),
        *_ON_ALL_GPUS[GATED],
    ),
}
