"""Compiles the kernels without a GPU (`tests.helpers.kernels.compile_kernels`), TRITON_INTERPRET unset:

    python -m ...compile_kernels 80 89          what the host code launches on such GPUs: of each kernel the
                                                           largest variant; shared memory, registers, spills are checked
    python -m ...compile_kernels 80 89 --all    all variants that differ in more than lengths; takes minutes
    python -m ...compile_kernels --hash [TEXT]  hashes of the PTX and the SASS for sm_90, of every variant of
                                                           the table whose name contains TEXT

Hashes of two commits tell whether a change of the sources changed the machine code. Names of kernels, source lines and
paths are no part of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

import saccade.kernels
from saccade.kernels.gemm import hopper_int4_split_k
from saccade.kernels.launch.device import Gpu
from tests.helpers.families.variant import BF16, F32, I32, I64, NONE, ONE, Variant, is_aligned
from tests.helpers.kernels.launched import SHAPES, SIMILAR, launches

HOPPER = 90
TENSOR_MEMORY = 100  # MMAs add up in a memory of their own, which few tiles fit
PDL_FROM = 90
FP8_FROM = 89
FP8_SHAPES = ("Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3.5-27B")  # heads of 128, experts, heads of 256
FP8_KERNELS = {  # that read or write nothing else
    "gemm.skinny_scaled:scaled_vector_kernel", "moe.experts_gemv_scaled:scaled_down_kernel",
    "moe.experts_gemv_scaled:scaled_gate_up_kernel", "ops.norm:_silu_fp8_kernel",
    "ops.quantize_rows:_quantize_kernel",
}  # fmt: skip
GPUS: Mapping[int, tuple[Gpu, ...]] = {  # by compute capability; the number of SMs decides configs, too
    80: (Gpu(108, (8, 0), 163 << 10),),  # A100
    89: (Gpu(58, (8, 9), 99 << 10), Gpu(128, (8, 9), 99 << 10)),  # L4, RTX 4090
    90: (Gpu(132, (9, 0), 227 << 10),),  # H100, H200
    100: (Gpu(148, (10, 0), 227 << 10),),  # B200
    120: (Gpu(36, (12, 0), 99 << 10), Gpu(170, (12, 0), 99 << 10)),  # RTX 5060 Ti, RTX 5090
}
REGISTERS = 1 << 16  # of an SM
MAX_REGISTERS = 255  # of a thread
DEFAULT_WARPS = 4  # Triton's
MAX_STACK = 320  # bytes that a thread may spill; launches on Hopper were chosen by time, whatever they spill
TILES = {
    "BINS", "BLOCK", "CHUNK", "CHUNKS", "COLUMNS", "EXPERTS", "FIRST", "INPUTS", "KEYS", "OUTPUTS", "PADDED",
    "PADDED_DIM", "PADDED_HALF", "PADDED_HEADS", "PADDED_NOPE", "PADDED_RANK", "PADDED_ROPE", "PADDED_VALUE", "PAIRS",
    "PARTS", "PIECES", "REST", "ROWS", "SIZE_PADDED", "TOKENS", "VALUES",
}  # fmt: skip
"""Constants that are sides of a tile, which decide what a program needs."""
ALIKE = ({80, 89, 120}, {90, 100})  # MMAs of the same kind take operands from registers, or from shared memory
OF_PDL = {"LINES", "LINES_PADDED", "PDL", "PREFETCH"}
LENGTHS = {
    "CHANNELS", "E", "GROUP", "HALF", "HEADS", "HIDDEN", "K", "KV_HEADS", "K_HEAD", "KEY_HEADS", "LINES", "MIN_SHARE",
    "QKV_ROW", "Q_HEAD", "ROTATED_HEAD", "SHARE", "SIZE", "SLOTS", "SPLITS", "VALUE_HEADS", "V_HEAD", "WIDE",
    "WIDTH",
}  # fmt: skip
"""Constants that are the length of a loop or a stride."""
FP8 = "fp8e4nv"


def box(rows: int, columns: int = 64, dtype: str = "bf16") -> str:
    size = 1 if dtype == FP8 else 2
    layout = gl.NVMMASharedLayout(swizzle_byte_width=size * columns, element_bitwidth=8 * size, rank=2)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def pairs(*size: int) -> str:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return f"tensordesc<bf16{list(size)},{layout!r}>"


HOPPER_VARIANTS = {
    "decode.bf16.2.6.8.16.3.4", "fp8_stream.32.128.True", "fp8_stream.64.0.False", "linear.fp16.2.True",
    "int4_stream.32.32.False", "int4_stream.64.64.True", "prefill.16", "qkv.16", "stream.128", "stream.128.gated",
    "stream.fp8.32.128.True", "vit.80",
}  # fmt: skip


def hopper_variant(
    name: str, kernel: str, types: list[str], constants: list[object], registers: int, pdl: bool = True
) -> Variant:
    return Variant(name, kernel, types, constants, {"num_warps": 4, "maxnreg": registers, "launch_pdl": pdl})


def hopper_variants() -> Iterator[Variant]:
    """Of the Gluon kernels."""

    of = hopper_variant
    for dtype, constants in (
        ("bf16", [2, 6, 8, 16, 3, 4]),
        ("bf16", [2, 6, 8, 32, 2, 1]),
        ("fp16", [16, 1, 8, 64, 3, 1]),
    ):
        tensor = f"*{dtype}"
        new = [F32 if constants[-1] != 1 else tensor, tensor, tensor, I32, NONE, NONE, NONE]
        rest = [tensor, tensor, I32, I32, I32, tensor, F32, F32, F32, I32, "fp32", "i32", "i32"]
        types = [box(constants[3], dtype=dtype)] * 2 + new + rest
        name = "decode." + ".".join(map(str, [dtype, *constants]))
        constants += [128, 128, (constants[1] + 2) * constants[0] * 128, 0.0]
        yield of(name, "attention.decode_hopper:_decode_kernel", types, constants, 144)
    new = [BF16, BF16, BF16, I32, F32, F32, F32]
    rest = [BF16, BF16, I32, I32, I32, BF16, F32, F32, F32, I32, "fp32", "i32", "i32"]
    for stages in (2, 3):  # heads of 256 with norms, a quarter rotates, a gate in each row; attention temperature
        constants = [4, 6, 8, 16, stages, 1, 256, 64, 56 * 256, 1e-6]
        name = f"decode.256.{stages}"
        yield of(name, "attention.decode_hopper:_decode_kernel", [box(16)] * 2 + new + rest, constants, 144)
    for block in (16, 128):
        types = [*[box(block)] * 2, BF16, I32, I32, I32, I32, BF16, F32, F32, F32, I32, "i32", "fp32", "i32:16", "i32"]
        constants = [128, 6, block, 128, 3, 4]
        yield of(f"prefill.{block}", "attention.prefill_hopper:_prefill_kernel", types, constants, 168, pdl=False)
    for dim, is_parted in ((80, False), (72, False), (80, True)):
        types = [box(64), box(64, 16), I32, I32, BF16, F32, "fp32", "i32"]
        name = "vit_parted" if is_parted else f"vit.{dim}"
        yield of(name, "attention.vit_hopper:_vit_kernel", types, [dim, 64, 8, is_parted], 128)
    for dtype, act, has_bias in (("bf16", 0, True), ("bf16", 1, True), ("bf16", 2, False), ("fp16", 2, True)):
        types = [box(64, dtype=dtype)] * 3 + [f"*{dtype}", "i32", "i32:16", "i32:16", "i32", "i32"]
        name = f"linear.{dtype}.{act}.{has_bias}"
        yield of(name, "gemm.hopper_act:_linear_act_kernel", types, [act, has_bias], 168)
    types = [*[box(64)] * 2, pairs(1, 32, 2, 64), pairs(4, 8, 2, 64), box(64), BF16, F32, "i32", "i32:16", "i32", "i32"]
    yield of("qkv.16", "gemm.hopper_vit_qkv_rope:_qkv_kernel", types, [16], 168)
    yield from split_k_variants()
    yield from int4_split_k_variants()


def split_k_variants() -> Iterator[Variant]:
    for rows, stages, splits, registers in ((16, 2, 8, 64), (32, 5, 4, 64), (64, 6, 4, 64), (128, 6, 4, 96)):
        types = [box(64), box(rows), NONE, F32, BF16, "i32", "i32:16"]
        constants = [1536, 0, rows, 64, stages, splits, False]
        yield hopper_variant(f"stream.{rows}", "gemm.hopper_split_k:_split_k_kernel", types, constants, registers)
    for rows, stages, registers in ((16, 5, 64), (64, 4, 96), (128, 3, 128)):
        types = [box(64), box(rows), NONE, box(rows), NONE, "i32", "i32:16"]
        constants = [1536, 0, rows, 64, stages, 1, True]
        yield hopper_variant(f"stream.{rows}.gated", "gemm.hopper_split_k:_split_k_kernel", types, constants, registers)
    for rows, block, gated in ((16, 128, False), (64, 0, False), (32, 128, True), (64, 0, True)):
        own = [box(rows), NONE] if gated else [F32, BF16]
        types = [box(64, dtype=FP8), box(rows), F32, *own, "i32", "i32:16"]
        constants = [4096, block, rows, 64, 8, 1 if gated else 4, gated]
        name = f"stream.fp8.{rows}.{block}.{gated}"
        yield hopper_variant(name, "gemm.hopper_split_k:_split_k_kernel", types, constants, 96 if rows < 64 else 128)
    for rows, block, group, gated in (
        (16, 128, 128, False),
        (64, 0, 64, False),
        (32, 128, 128, True),
        (64, 0, 128, True),
    ):
        own = [box(rows, dtype=FP8), F32, NONE] if gated else [F32, NONE, BF16]
        types = [*(box(count, group, FP8) for count in (64, rows)), F32, F32, *own, "i32", "i32:16", "i32", "i32"]
        constants = [4096, block, rows, 64, group, 3, 1 if gated else 4, gated, 448.0, 1e-10]
        name, registers = f"fp8_stream.{rows}.{block}.{gated}", 128 if gated and rows == 64 else 96
        yield hopper_variant(name, "gemm.hopper_fp8_split_k:_fp8_split_k_kernel", types, constants, registers)


def int4_split_k_variants() -> Iterator[Variant]:
    kernel = "gemm.hopper_int4_split_k:_int4_split_k_kernel"
    for rows, group, gated in ((8, 128, False), (8, 128, True), (32, 32, False), (64, 64, True), (64, 128, True)):
        tile, stages = 32 if gated else 64, hopper_int4_split_k.choose_gated(rows).stages
        own = [BF16, NONE] if gated else [F32, BF16]
        types = [box(tile, 32, "i16"), box(rows), "*fp16", "*u8", *own, "i32", "i32:16", "i32"]
        constants = [4096, group, rows, tile, stages, 1 if gated else 4, gated]
        registers = hopper_int4_split_k.registers(rows, group)
        yield hopper_variant(f"int4_stream.{rows}.{group}.{gated}", kernel, types, constants, registers)


def triton_variants() -> Iterator[Variant]:
    yield from decode_variants()
    yield from prefill_variants()
    yield from vit_variants()
    yield from skinny_variants()
    yield from int4_variants()
    yield from moe_variants()
    yield from mla_variants()
    yield from small_variants()
    yield from gdn_variants()


EARLY = {"launch_pdl": True}


def new_variant(
    name: str, kernel: str, types: list[str], constants: list[object], warps: int = 4, **options: Any
) -> Variant:
    return Variant(name, kernel, types, constants, {"num_warps": warps, **options})


def decode_variants() -> Iterator[Variant]:
    rest = [BF16, BF16, I32, I32, BF16, F32, F32, F32, I32, *["fp32"] * 4, "i32", "i32:16"]
    decode = [F32, BF16, BF16, I32, NONE, NONE, NONE, *rest]
    for splits, keys, stages in ((1, 64, 3), (4, 64, 4), (16, 128, 1)):
        constants = [16, 2, 6, 128, splits, 16, 128, keys, "tf32", 4, min(splits, 8), splits >= 8, True, 128, 2048, 0.0]
        name = f"triton_decode.{splits}"
        yield new_variant(name, "attention.decode_triton:_decode_kernel", decode, constants, num_stages=stages, **EARLY)
    wide = [BF16, BF16, BF16, I32, F32, F32, F32, *rest]
    for splits, keys, stages in ((1, 32, 3), (4, 32, 4), (16, 64, 1)):
        fixed = ["tf32", 1, min(splits, 4), splits >= 8, True, 64, 56 * 256, 1e-6]
        constants = [16, 4, 6, 256, splits, 16, 256, keys, *fixed]
        name = f"triton_decode.256.{splits}"
        yield new_variant(name, "attention.decode_triton:_decode_kernel", wide, constants, num_stages=stages, **EARLY)
    yield new_variant(
        "plan", "attention.decode_hopper_schedule:_plan_kernel", [I32, I32, "i32", "i32"], [2, 64, 10, 64]
    )


def prefill_variants() -> Iterator[Variant]:
    """Attention, and what writes the KV cache before it."""
    types = [BF16] * 3 + [I32] * 4 + [BF16]
    for is_split, one_loop in ((True, False), (False, False), (False, True)):
        parts = [F32, F32, F32, I32] if is_split else [NONE] * 4
        steps = ["i32", "fp32", "fp32", "i32:16", "i32:16", "i32:16", "i32"]
        constants = [128, 128, 128, 16, 6, 128, 128, 64, 64, is_split, 4, "tf32", True, one_loop]
        name = f"triton_prefill.{is_split}.{one_loop}"
        yield new_variant(
            name, "attention.prefill_triton:_prefill_kernel", types + parts + steps, constants, num_stages=5, **EARLY
        )
    for rows, keys, warps, stages in ((128, 64, 8, 4), (64, 32, 4, 5)):
        steps = ["i32", "fp32", "fp32", "i32:16", "i32:16", "i32:16", "i32"]
        constants = [256, 256, 256, 16, 6, 256, 256, rows, keys, False, 4, "tf32", True, False]
        name = f"triton_prefill.256.{rows}"
        kernel = "attention.prefill_triton:_prefill_kernel"
        yield new_variant(name, kernel, types + [NONE] * 4 + steps, constants, warps, num_stages=stages, **EARLY)
    types = [F32, F32, F32, I32, BF16, "i32", "i32"]
    yield new_variant(
        "prefill_combine", "attention.prefill_combine:_combine_kernel", types, [128, 128, 4, True], 2, **EARLY
    )
    types = [BF16] * 8 + [I64, NONE, "fp32", "fp32", "i32:16", "i32:16", "i32"]
    constants = [12, 2, 128, 16, 2, 64, 1, True, 128]
    yield new_variant("rope_store_kv", "attention.rope_store_kv:_rotary_kernel", types, constants, **EARLY)
    types = [F32] * 3 + [BF16] * 5 + [I32, NONE, "fp32", "fp32", "i32:16", "i32:16", "i32"]
    constants = [12, 2, 128, 16, 2, 64, 4, True, 128]
    yield new_variant("rope_store_kv.parts", "attention.rope_store_kv:_rotary_kernel", types, constants, **EARLY)
    types = [BF16] * 8 + [I32, F32, "fp32", "fp32", "i32:16", "i32:16", "i32"]
    constants = [24, 4, 256, 32, 4, 32, 1, True, 64]
    yield new_variant("rope_store_kv.256", "attention.rope_store_kv:_rotary_kernel", types, constants, **EARLY)
    types = [BF16] * 4 + ["i32:16"] * 4 + ["i32"] * 2
    yield new_variant("rotary", "attention.rope_store_kv:_rotary_in_place_kernel", types, [16, 64, 128, True], **EARLY)


def vit_variants() -> Iterator[Variant]:
    types = [F32, I32, BF16, "i32"]
    yield new_variant(
        "vit_combine", "attention.vit_combine:_combine_kernel", types, [80, 128, 192, 84, 5, 8, True], 1, **EARLY
    )
    types = [BF16, BF16, BF16, I32, I32, BF16, "fp32", "i32:16", "i32:16", "i32:16"]
    for dim, first, rest in ((80, 64, 16), (64, 64, 0), (72, 64, 16)):
        constants = [dim, dim, dim, dim, first, rest, 128, 64, "tf32"]
        yield new_variant(
            f"triton_vit.{dim}", "attention.vit_triton:_vit_kernel", types, constants, 8, num_stages=3, maxnreg=128
        )


def skinny_variants() -> Iterator[Variant]:
    for gated in (False, True):
        types = [BF16, BF16, NONE if gated else BF16, NONE if gated else BF16, BF16, BF16, "fp32", "i32:16"]
        constants = [1536, 4, 512, 4, gated, True, 8]
        yield new_variant(f"vector.{gated}", "gemm.skinny:_vector_kernel", types, constants, **EARLY)
        work = [NONE, NONE, NONE] if gated else [F32, F32, I32]
        types = [BF16, BF16, NONE, NONE, NONE if gated else BF16, BF16, BF16, *work, "fp32", "i32", *["i32:16"] * 3]
        constants = [1536, 0, 16, 64, 128, 1 if gated else 4, gated, "tf32", True, 4]
        yield new_variant(f"tile.{gated}", "gemm.skinny:_tile_kernel", types, constants, **EARLY)


def int4_variants() -> Iterator[Variant]:
    """The largest launches of `choose_int4`, with groups of 32 and zero points."""
    types = [I32, I32, "*fp16", "*u8", NONE, NONE, I32, BF16, "fp32", "i32:16"]
    vector, tile = "gemm.int4_vector:int4_vector_kernel", "gemm.int4_tiles:int4_tile_kernel"
    yield new_variant("int4_vector.gated", vector, types, [4096, 32, 4, 4096, True, True, False], 2)
    yield new_variant("int4_vector", vector, types, [12288, 32, 8, 2048, False, True, True], 2, **EARLY)
    first, sizes = [BF16, "*i16", "*fp16", "*u8", NONE, NONE, BF16], ["i32", "i32:16", "i32:16"]
    for rows, outputs, inputs, stages in ((32, 64, 256, 3), (64, 32, 128, 4)):
        constants = [4096, 32, rows, outputs, inputs, 1, True, True, True, 0]
        types = [*first, *[NONE] * 3, *sizes]
        yield new_variant(f"int4_tile.gated.{rows}", tile, types, constants, num_stages=stages, **EARLY)
    types = [*first, F32, F32, I32, *sizes]
    constants = [4096, 32, 64, 64, 256, 4, False, True, True, 0]
    yield new_variant("int4_tile.64", tile, types, constants, num_stages=3, **EARLY)
    constants = [4096, 32, 16, 32, 128, 4, False, True, True, 0]
    yield new_variant("int4_tile.16", tile, types, constants, 2, num_stages=4, **EARLY)
    types = ["*i16", "*fp16", "*u8", BF16, "i32:16"]
    yield new_variant("unpack_int4", "ops.unpack_int4:_unpack_kernel", types, [4096, 32, 4, 8])
    yield from int4_expert_variants()


def int4_expert_variants() -> Iterator[Variant]:
    """The largest launches of `fused_moe.choose_int4`, for Qwen3-VL-30B-A3B's experts."""
    first, gemv, tiles = [I32, I32, "*fp16", "*u8", I32], "moe.experts_gemv_int4", "moe.experts_int4"
    types = [*first, BF16, "i32:16", "i32:16"]
    constants = [2048, 8, 32, 4, 2048, True, True]
    yield new_variant("int4_experts.gate_up", f"{gemv}:int4_gate_up_kernel", types, constants, 1, **EARLY)
    types = [*first, F32, BF16, NONE, BF16, "i32:16"]
    constants = [768, 8, 32, 4, 2048, True, 12, 16, True]
    yield new_variant("int4_experts.down", f"{gemv}:int4_down_kernel", types, constants, 2, **EARLY)
    first = [BF16, "*i16", "*fp16", "*u8", I32, I32]
    types = [*first, BF16, "i32:16", "i32", "i32:16", "i32"]
    constants = [2048, 32, 64, 64, 128, 8, True, True]
    kernel = f"{tiles}:int4_gate_up_tile_kernel"
    yield new_variant("int4_experts.gate_up_tile", kernel, types, constants, num_stages=4, **EARLY)
    types = [*first, F32, BF16, "i32:16", "i32"]
    constants = [768, 32, 64, 128, 128, 8, True, True]
    kernel = f"{tiles}:int4_down_tile_kernel"
    yield new_variant("int4_experts.down_tile", kernel, types, constants, 8, num_stages=4, **EARLY)


def gdn_variants() -> Iterator[Variant]:
    """Qwen3.5-9B's heads; tests of other shapes run in the interpreter."""

    def of(
        name: str, kernel: str, types: list[str], constants: list[object], warps: int = 4, **options: Any
    ) -> Variant:
        return Variant(name, f"gdn.{kernel}", types, constants, {"num_warps": warps, "launch_pdl": True, **options})

    heads: list[object] = [16, 32, 128, 128]
    types = [BF16] * 6 + [F32, I32, I32, BF16, "i32:16", "i32:16", "fp32"]
    for warps in (4, 8):
        yield of(f"gdn_decode.{warps}", "decode:_decode_kernel", types, [*heads, 4, 128, 128, 4, True, True], warps)
    types = [I32] * 4 + ["i32"] * 3
    yield Variant("gdn_plan", "gdn.prefill_plan:_plan_kernel", types, [64, 32, 128], {"num_warps": 4})
    types = [BF16] * 5 + [I32] + [BF16] * 4 + [F32, "i32:16"]
    yield of("gdn_chunk", "prefill_intra_chunk:chunk_kernel", types, [*heads, 4, 128, 128, 64, "tf32", True])
    small: list[object] = [2, 4, 16, 24, 4, 16, 32, 64, "tf32x3", True]  # keys and values of different sizes
    types32 = [F32] * 5 + [I32] + [F32] * 5 + ["i32:16"]
    yield of("gdn_chunk.small", "prefill_intra_chunk:chunk_kernel", types32, small)
    types = [BF16] * 3 + [F32, BF16, BF16, F32] + [I32] * 3 + ["i32"]
    for block, warps in ((64, 4), (32, 4), (32, 2), (16, 1)):
        constants = [*heads, 128, block, 64, 64, "tf32", True]
        yield of(f"gdn_scan.{block}.{warps}", "prefill_scan:scan_kernel", types, constants, warps, num_stages=3)
    types = [BF16, BF16, I32] + [BF16] * 3 + [F32, BF16, BF16, "i32:16", "i32:16", "fp32"]
    yield of("gdn_output", "prefill_output:output_kernel", types, [*heads, 128, 128, 64, "tf32", True])
    types = [BF16, BF16] + [I32] * 3 + ["i32:16", "i32"]
    yield of("gdn_past", "prefill_output:past_kernel", types, [8192, 4, 4, 256, 64, True])


def moe_variants() -> Iterator[Variant]:
    """Of Qwen3-VL-30B-A3B: 128 experts of 768 by 2048, 8 of them per token."""

    def of(
        name: str, kernel: str, types: list[str], constants: list[object], warps: int = 4, stages: int = 3
    ) -> Variant:
        return Variant(
            name, f"moe.{kernel}", types, constants, {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        )

    for name, bias, groups in (("", NONE, [1, 128, 1, 128, 1]), (".groups", F32, [8, 9, 8, 16, 3])):
        constants = [4, groups[0] * groups[1] + 1, *groups, 8, 1, 16, bias == F32, True, True, True]
        yield of(f"moe_route{name}", "topk_routing:_route_kernel", [F32, bias, F32, I32, "i32", "fp32"], constants, 1)
    for dtype, parts, count, tokens, experts, inputs, share in (
        ("bf16", 3, 128, 16, 16, 64, 128),
        ("bf16", 3, 257, 64, 64, 64, 1024),
        ("bf16", 3, 257, 128, 128, 64, 2048),
        ("fp16", 1, 128, 64, 64, 64, 1024),
    ):
        types = [f"*{dtype}", F32 if parts == 1 else BF16, F32, "i32", "i32:16"]
        constants = [count, 2048, share, tokens, experts, 16 if count == 257 else 0, inputs, parts, True, tokens == 16]
        warps = 8 if tokens == 128 else 4
        yield of(f"moe_router.{dtype}.{tokens}", "router_gemm:_router_kernel", types, [*constants, True], warps)
    yield of("moe_count", "sorting:_count_kernel", [I32, I32, "i32", "i32", "i32"], [256, 128, True])
    yield of("moe_scan", "sorting:_scan_kernel", [I32, "i32"], [256, True], 1)
    for name, counts, constants, warps in (
        ("few", NONE, [64, 32, 128, 1024, 16, 16, True], 8),
        ("many", I32, [256, 32, 128, 0, 8, 128, True], 8),
    ):
        types = [I32, counts, I32, I32, "i32", "i32", "i32", "i32"]
        yield of(f"moe_sort.{name}", "sorting:_sort_kernel", types, constants, warps)
    for rows, tma in ((16, False), (16, True), (128, False), (128, True)):
        swapped = rows < 128
        outputs = 64 if swapped else 128
        tail = [outputs, 64, 1 if swapped else 8, swapped, tma, "tf32", True]
        weight = f"tensordesc<bf16[{outputs}, 64]>" if tma else BF16
        wide = f"tensordesc<bf16[{rows}, 64]>" if tma else BF16
        name = f"{rows}{'.tma' if tma else ''}"
        warps = 4 if swapped else 8
        types = [BF16, weight, NONE, NONE, I32, I32, BF16, "i32:16", "i32", "i32:16", "i32", "i32:16"]
        yield of(f"moe_gate_up.{name}", "experts:_gate_up_kernel", types, [2048, 0, rows, *tail], warps, 4)
        types = [wide, weight, NONE, NONE, I32, I32, F32, BF16, "i32:16", "i32", "i32:16"]
        constants = [768, 0, rows, 8 if swapped and not tma else 0, *tail]
        yield of(f"moe_down.{name}", "experts:_down_kernel", types, constants, warps, 4)
    types = [BF16, BF16, I32, BF16, "i32:16", "i32:16"]
    yield of("moe_vector_gate_up", "experts_gemv:_gate_up_kernel", types, [2048, 8, 8, 256, 1, True], 4, 1)
    types = [BF16, BF16, I32, F32, BF16, F32, BF16, "i32:16"]
    yield of("moe_vector_down", "experts_gemv:_down_kernel", types, [768, 8, 2, 256, 24, 32, True], 1, 4)
    yield of("moe_combine", "combine:_combine_kernel", [BF16, BF16, BF16, BF16, "i32:16"], [8, 1024, True])


def mla_variants() -> Iterator[Variant]:
    def of(
        name: str, kernel: str, types: list[str], constants: list[object], warps: int = 4, stages: int = 3
    ) -> Variant:
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        return Variant(f"mla_{name}", f"attention.{kernel}", types, constants, options)

    types = [BF16] * 6 + [I32, BF16, "fp32", "i32:16", "i32:16", "i32:16"]
    yield of("store", "mla_store:_store_kernel", types, [192, 576, 16, 512, 64, 16, 512, 32, True])
    for heads, rows, warps, is_split in ((16, 16, 4, True), (16, 16, 4, False), (32, 32, 8, False)):
        parts = [F32, F32, F32, I32] if is_split else [NONE] * 4
        types = [BF16, BF16, I32, I32, NONE, NONE, BF16, *parts, "i32", "fp32", "i32"]
        constants = [16, heads, 1, 512, 64, 512, 64, rows, 64, is_split, 1, "tf32", True, True]
        yield of(f"decode.{heads}.{is_split}", "mla_absorbed:_attention_kernel", types, constants, warps, 2)
    types = [BF16, BF16, I32, I32, I32, I32, BF16, *[NONE] * 4, "i32", "fp32", "i32"]
    constants = [16, 16, 4, 512, 64, 512, 64, 64, 64, False, 4, "tf32", True, True]
    yield of("absorbed_prefill", "mla_absorbed:_attention_kernel", types, constants, 8, 2)
    types = [BF16, BF16, BF16, I32, I32, I32, BF16, "fp32", "i32:16"]
    constants = [192, 16, 512, 128, 64, 128, 128, 64, 128, 128, 64, "tf32", True]
    yield of("expanded_prefill", "mla_expanded:_expanded_kernel", types, constants, 8)
    yield of("gather", "mla_expanded:_gather_kernel", [BF16, I32, I32, I32, BF16, "i32"], [16, 576, 1024, 16, True])


def small_variants() -> Iterator[Variant]:
    def of(
        name: str, kernel: str, types: list[str], constants: list[object], warps: int = 4, pdl: bool = True
    ) -> Variant:
        return Variant(name, f"ops.{kernel}", types, constants, {"num_warps": warps, "launch_pdl": pdl})

    fp8 = [128, 448.0, 1e-10]
    for parts, only in ((1, NONE), (4, I32)):
        types = [BF16 if parts == 1 else F32, BF16, BF16, only, BF16, BF16, NONE, "fp32", "i32:16"]
        yield of(f"add_rms_norm.{parts}", "norm:_norm_kernel", types, [1536, 2048, parts, *fp8, True])
    types = [BF16, NONE, BF16, NONE, BF16, NONE, NONE, "fp32", "i32:16"]
    yield of("rms_norm", "norm:_norm_kernel", types, [2048, 2048, 1, *fp8, True])
    types = [F32, BF16, BF16, NONE, f"*{FP8}", BF16, F32, "fp32", "i32:16"]
    yield of("norm_fp8", "norm:_norm_kernel", types, [4096, 4096, 4, *fp8, True], 16)
    types = [BF16, f"*{FP8}", F32, "i32", "i32", "i32:16"]
    yield of("quantize", "quantize_rows:_quantize_kernel", types, [4096, 1024, 128, 1e-10, 448.0], pdl=False)
    yield of("silu_and_mul", "norm:_silu_kernel", [BF16, BF16, "i32:16", "i32:16"], [1024, True])
    types = [BF16, f"*{FP8}", F32, "i32", "i32:16"]
    yield of("silu_and_mul_fp8", "norm:_silu_fp8_kernel", types, [1024, *fp8, True])
    types = [BF16, BF16, BF16, "i32", "i32", "i32", "fp32"]
    yield of("head_norm", "qk_norm:_head_norm_kernel", types, [128, 128, 8, True])
    types = [BF16, F32, F32, "i32", "i32", "i32", "fp32"]
    yield of("head_norm.256", "qk_norm:_head_norm_kernel", types, [256, 256, 8, True])
    types = [BF16, BF16, "i32:16", "i32:16", "i32:16"]
    yield of("sigmoid_gate", "output_gate:_gate_kernel", types, [1024, True])
    for splits in (1, 8):
        types = [BF16, I64, I32, I64, I64, I32, "i32:16", "i32:16"]
        yield of(f"argmax.{splits}", "argmax:_argmax_kernel", types, [splits, splits, 4096, 2, splits > 1, True])
    for dtype, unused in (("bf16", 16), ("fp32", 0)):
        types = [f"*{dtype}", I64, "*fp64", "i32", "i32", I64, I64, I32, "i32:16"]
        yield of(f"sample.{dtype}", "sample:_sample_kernel", types, [unused, 8192], 16, pdl=False)
    for name, scales in (("", NONE), (".temperature", F32)):
        constants = [16, 1536, 1536, 2048, 64, 64, 0.1, 16384]
        types = [I32] * 5 + [I64, BF16, F32, I32, BF16, BF16, BF16, I32, scales, "i32"]
        yield of(f"decode_inputs{name}", "prepare_inputs:_inputs_kernel", types, constants, pdl=False)
        types = [I32] * 4 + [BF16, BF16, F32, I64, BF16, BF16, I32, I32, scales, "i32", "i32"]
        yield of(f"prefill_inputs{name}", "prepare_inputs:_prefill_inputs_kernel", types, constants, pdl=False)
    types = ["*u8", I32, I32, "*u8", *["i32"] * 5]
    yield of("resample", "image_preprocess:_weigh_kernel", types, [22, 1024], pdl=False)
    types = ["*u8", BF16, "i32", "i32", *["fp32"] * 6]
    yield of("cut_patches", "image_preprocess:_cut_kernel", types, [14, 2, 2, 196, 1024], pdl=False)
    vit = "vit_elementwise"
    yield of("vit_norm", f"{vit}:_norm_kernel", [BF16] * 5 + ["fp32"], [1280, 2048, True], 1)
    yield of("vit_rms_norm", f"{vit}:_rms_norm_kernel", [BF16] * 4 + ["fp32"], [1280, 2048, True], 1)
    yield of("vit_rotate", f"{vit}:_rotate_kernel", [BF16, F32], [16, 80, 32, 64, True])
    yield of("vit_cos_sin", f"{vit}:_cos_sin_kernel", [I32, F32, F32], [20, 32, 0], 1, pdl=False)
    yield of("vit_quick_gelu", f"{vit}:_quick_gelu_kernel", [BF16, "i32:16"], [4096], 8, pdl=False)
    yield of("vit_silu_and_mul", f"{vit}:_silu_and_mul_kernel", [BF16], [3420, 1024], pdl=False)
    yield of("vit_tanh_gelu", f"{vit}:_tanh_gelu_kernel", [BF16, "i32:16"], [4096], 8, pdl=False)


def build(variant: Variant, arch: int) -> Any:
    kernel = kernel_of(variant)
    given = [*variant.types, *["constexpr"] * len(variant.constants)]
    assert len(given) == len(kernel.params), (variant.name, len(given), [param.name for param in kernel.params])
    constants = {len(variant.types) + i: value for i, value in enumerate(variant.constants)}
    constants |= {i: None for i, kind in enumerate(given) if kind == NONE}
    constants |= {i: 1 for i, kind in enumerate(given) if kind == ONE}
    free = [not (param.do_not_specialize or param.do_not_specialize_on_alignment) for param in kernel.params]
    aligned = [i for i, kind in enumerate(given) if is_aligned(kind) and free[i]]
    kinds = [re.sub(":16?$", "", kind) if i not in constants else "constexpr" for i, kind in enumerate(given)]
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return triton.compile(
        source(
            fn=kernel,
            signature={param.name: kind for param, kind in zip(kernel.params, kinds, strict=True)},
            constexprs={(i,): value for i, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        ),
        target=GPUTarget("cuda", arch, 32),
        options=variant.options,
    )


def kernel_of(variant: Variant) -> Any:
    module, function = variant.kernel.split(":")
    return getattr(import_module(f"saccade.kernels.{module}"), function)


class Resources(NamedTuple):
    shared: int  # bytes of a program
    registers: int  # of a thread
    stack: int  # bytes of a thread: registers that were spilled
    has_mma: bool  # tensor cores, whose instructions differ between GPUs
    is_trap: bool  # Triton made this of a kernel without enough tensor memory

    def problems(self, arch: int, warps: int) -> Iterator[str]:
        limit = GPUS[arch][0].shared_memory
        if self.is_trap:
            yield "it ends in a trap"
        if self.shared > limit:
            yield f"{self.shared} bytes of shared memory, {limit} are allowed"
        if 32 * warps * self.registers > REGISTERS:
            yield f"{self.registers} registers for {warps} warps, an SM has {REGISTERS}"
        if self.stack > MAX_STACK and arch != HOPPER:
            yield f"{self.stack} bytes spilled by each thread, {MAX_STACK} are allowed"

    def is_small(self, limit: int) -> bool:
        """Half of what there is, at most: another GPU's compiler would not need twice as much of what all have."""
        is_half = 2 * self.shared <= limit and self.registers <= MAX_REGISTERS // 2
        return is_half and self.stack == 0 and not self.has_mma


def resources(made: Any) -> Resources:
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", cuobjdump(made, "-res-usage"))}
    ptx = made.asm["ptx"]
    return Resources(made.metadata.shared, found["REG"], found["STACK"], "mma." in ptx, "\ttrap;" in ptx)


class Check:
    """What does not compile, or could not start, on GPUs that are checked one after the other."""

    def __init__(self, *, is_all: bool) -> None:
        self.is_all = is_all
        self.wrong: list[str] = []
        self._known: dict[object, list[tuple[int, bool, Resources]]] = {}  # by launch: where it was compiled, with PDL?

    def run(self, arch: int) -> None:
        variants = launched_on(arch, is_all=self.is_all)
        lacking = missing(variants) - (set() if arch >= FP8_FROM else FP8_KERNELS)
        self.wrong += [f"{kernel}: no model launches it, and the table has no variant" for kernel in lacking]
        limit = GPUS[arch][0].shared_memory
        compiled = [variant for variant in variants if self.is_all or not self._is_known(variant, arch, limit)]
        for variant in compiled:
            try:
                found = resources(build(variant, arch))
            except Exception as error:  # a missing instruction, a wrong layout
                self.wrong.append(f"sm_{arch} {described(variant)}: {type(error).__name__}: {error}")
                continue
            self._known.setdefault(launch_of(variant), []).append((arch, has_pdl(variant), found))
            problems = found.problems(arch, variant.options.get("num_warps", DEFAULT_WARPS))
            self.wrong += [f"sm_{arch} {described(variant)}: {problem}" for problem in problems]
        print(f"sm_{arch}: {len(compiled)} of {len(variants)} kernels, {cpu_seconds():.0f} s of CPU time", flush=True)

    def _is_known(self, variant: Variant, arch: int, limit: int) -> bool:
        """Whether the same launch, compiled for another GPU, tells that this one has all that it needs."""
        for other, with_pdl, found in self._known.get(launch_of(variant), []):
            is_alike = any({other, arch} <= alike for alike in ALIKE)
            is_older = other < arch and with_pdl == has_pdl(variant)  # newer GPUs have its instructions, older may not
            if found.shared <= limit if is_alike else is_older and found.is_small(limit):
                return True
        return False


def has_pdl(variant: Variant) -> bool:
    return bool(variant.options.get("launch_pdl"))


def launch_of(variant: Variant) -> object:
    """What decides the resources of a program: all but lengths, strides and PDL."""
    constants = [(name, value) for name, value in constants_of(variant).items() if name not in LENGTHS | OF_PDL]
    options = [(name, value) for name, value in variant.options.items() if name != "launch_pdl"]
    missing = [kind == NONE for kind in variant.types]
    return (variant.kernel, has_fp8(variant), *missing, *constants, *sorted(options))


def launched_on(arch: int, *, is_all: bool) -> list[Variant]:
    """What the host code launches on these GPUs, and kernels of the table that it does not launch."""
    dtypes = [torch.bfloat16, torch.float16] if is_all else [torch.bfloat16]
    shapes = [name for name in SHAPES if is_all or name not in SIMILAR]
    by_host = [variant for gpu in GPUS[arch] for variant in launches(gpu, shapes, dtypes)]
    found = distinct(by_host) if is_all else largest(by_host, arch)
    if arch >= FP8_FROM:
        found += fp8_launches(arch, FP8_SHAPES if is_all else FP8_SHAPES[:2])
    known = {variant.kernel for variant in found} | (set() if arch >= FP8_FROM else FP8_KERNELS)
    always = {"norm_fp8"} if arch >= FP8_FROM else set()  # launched with layers in float8 alone
    found += [
        for_arch(variant, arch)
        for variant in triton_variants()
        if variant.name in always or variant.kernel not in known
    ]
    if arch == HOPPER:
        found += [variant for variant in hopper_variants() if is_all or variant.name in HOPPER_VARIANTS]
    return found


def fp8_launches(arch: int, shapes: Iterable[str]) -> list[Variant]:
    """What the host code launches over an FP8 KV cache and weights in FP8, and not over others."""
    by_host = [variant for gpu in GPUS[arch] for variant in launches(gpu, shapes, [torch.bfloat16], fp8=True)]
    return largest((variant for variant in by_host if has_fp8(variant)), arch)


def has_fp8(variant: Variant) -> bool:
    return any("fp8" in kind for kind in variant.types)


def missing(variants: Iterable[Variant]) -> set[str]:
    """Triton kernels that are not among these."""
    root = Path(saccade.kernels.__file__).parent
    modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")]
    found = set()
    for module in modules:
        members = vars(import_module(f"saccade.kernels.{module}".removesuffix(".__init__"))).values()
        kernels = [one for one in members if type(one) is JITFunction and one.fn.__name__.endswith("_kernel")]
        found |= {f"{module}:{one.fn.__name__}" for one in kernels if one.fn.__module__.endswith(module)}
    return found - {variant.kernel for variant in variants}


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    """The first of each launch."""
    found: dict[object, Variant] = {}
    for variant in variants:
        found.setdefault(launch_of(variant), variant)
    return list(found.values())


def largest(variants: Iterable[Variant], arch: int) -> list[Variant]:
    """Of each kernel the variant with the largest tiles, times stages.

    Where operands are in registers, also with heads of 256.
    """
    found: dict[tuple[str, bool], Variant] = {}
    for variant in variants:
        key = (variant.kernel, arch in ALIKE[0] and constants_of(variant).get("DIM") == 256)
        other = found.setdefault(key, variant)
        if tile_size(variant) > tile_size(other):
            found[key] = variant
    return list(found.values())


def tile_size(variant: Variant) -> tuple[int, int]:
    constants = constants_of(variant)
    sides = [value for name, value in constants.items() if name in TILES and value]
    return prod(sides) * variant.options.get("num_stages", 1), constants.get("KEYS", 0)


def for_arch(variant: Variant, arch: int) -> Variant:
    """A variant of the table as it would be launched there."""
    if arch != HOPPER and variant.name == "int4_experts.gate_up_tile":
        variant = with_constants(variant, OUTPUTS=32)
    if arch == TENSOR_MEMORY and variant.name.startswith("int4_tile"):
        variant = with_constants(variant, INPUTS=128)
    if arch >= PDL_FROM:
        return variant
    variant = with_constants(variant, PDL=False, PREFETCH=0)
    options = {name: value for name, value in variant.options.items() if name != "launch_pdl"}
    return variant._replace(options=options)


def with_constants(variant: Variant, **others: object) -> Variant:
    """Those that it has of these."""
    return variant._replace(constants=[others.get(name, value) for name, value in constants_of(variant).items()])


def constants_of(variant: Variant) -> dict[str, Any]:
    names = [param.name for param in kernel_of(variant).params[len(variant.types) :]]
    return dict(zip(names, variant.constants, strict=True))


def described(variant: Variant) -> str:
    return f"{variant.name}: {variant.kernel} {constants_of(variant)} {variant.options}"


def cpu_seconds() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def ptx_hash(made: Any) -> str:
    text = re.sub(r"//.*", "", made.asm["ptx"].replace(made.metadata.name, "kernel"))
    lines = [line.strip() for line in text.split(".section")[0].splitlines()]
    return _hash("\n".join(line for line in lines if line and not line.startswith((".loc", ".file"))))


def sass_hash(made: Any) -> str:
    return _hash("\n".join(line.strip() for line in cuobjdump(made, "-sass").splitlines() if "/*" in line))


def cuobjdump(made: Any, what: str) -> str:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        command = [str(tools / "cuobjdump"), what, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def print_hashes(text: str) -> None:
    for variant in (*hopper_variants(), *triton_variants()):
        if text in variant.name:
            made = build(variant, HOPPER)
            print(f"{variant.name:24} ptx {ptx_hash(made)} sass {sass_hash(made)}", flush=True)


def main(arguments: list[str]) -> None:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # less to compile, and lines are no part of hashes
    if arguments[0] == "--hash":
        print_hashes("".join(arguments[1:]))
        return
    check = Check(is_all="--all" in arguments)
    for arch in [int(argument) for argument in arguments if argument != "--all"]:
        check.run(arch)
    if check.wrong:
        sys.exit("\n".join(check.wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
