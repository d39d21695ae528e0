"""Kernels with arguments as some model has them: what no host code launches without a GPU, and what hashes compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton.experimental.gluon import language as gl

from saccade.kernels.gemm import hopper_int4_split_k
from tests.helpers.families.variant import BF16, F32, I32, I64, NONE, Variant

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
    for dtype, act, has_bias in (("bf16", 0, True), ("bf16", 1, True), ("bf16", 3, False), ("fp16", 2, True)):
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
        constants = [1536, 0, rows, 64, stages, 1, 2 if rows == 64 else 1]
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
    yield from norm_variants()
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
    for dim, rows, tile, window, cap in ((512, 64, 64, 0, True), (256, 16, 1, 1024, False)):  # prefill, decode
        parts = [F32, F32, F32, I32] if tile == 1 else [NONE] * 4
        scales = ["i32", "fp32", "fp32", "fp32", "i32:16", "i32:16", "i32:16", "i32"]
        constants = [16, dim, dim, dim, 16, 2, 2, dim, dim, rows, 32, tile, -(-2 * tile // rows), 8]
        constants += [window, 0, False, cap, tile == 1, "tf32"]
        ends = [I32 if tile > 1 else NONE, BF16, BF16]  # blocks, sinks, out
        types = [BF16] * 3 + [I32] * 4 + ends + parts + scales
        kernel = "attention.ruled:_ruled_kernel"
        yield new_variant(f"ruled.{dim}", kernel, types, constants, 8 if rows > 16 else 4, num_stages=2)
    types = [F32, F32, F32, I32, BF16, "i32", "i32"]
    yield new_variant(
        "prefill_combine", "attention.prefill_combine:_combine_kernel", types, [128, 128, 4, True], 2, **EARLY
    )
    types = [BF16] * 8 + [I64, NONE, "fp32", "fp32", "i32:16", "i32:16", "i32"]
    constants = [12, 2, 128, 16, 2, 64, 1, True, 128, 128, 256]
    yield new_variant("rope_store_kv", "attention.rope_store_kv:_rotary_kernel", types, constants, **EARLY)
    types = [F32] * 3 + [BF16] * 5 + [I32, NONE, "fp32", "fp32", "i32:16", "i32:16", "i32"]
    constants = [12, 2, 128, 16, 2, 64, 4, True, 128, 128, 256]
    yield new_variant("rope_store_kv.parts", "attention.rope_store_kv:_rotary_kernel", types, constants, **EARLY)
    types = [BF16] * 8 + [I32, F32, "fp32", "fp32", "i32:16", "i32:16", "i32"]
    constants = [24, 4, 256, 32, 4, 32, 1, True, 64, 192, 2048]
    yield new_variant("rope_store_kv.256", "attention.rope_store_kv:_rotary_kernel", types, constants, **EARLY)
    types = [BF16] * 4 + ["i32:16"] * 4 + ["i32"] * 2
    kernel = "attention.rope_store_kv:_rotary_in_place_kernel"
    yield new_variant("rotary", kernel, types, [16, 64, 128, True, 128, 128], **EARLY)
    yield new_variant("rotary.neighbours", kernel, types, [16, 64, 128, True, 2, 128], **EARLY)


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
    yield of("gdn_past", "prefill_output:past_kernel", types, [8192, 4, 4, 256, 64, 0, True])
    yield of("gdn_past.gated", "prefill_output:past_kernel", types, [2048, 3, 2, 256, 64, 4096, True])  # LFM2-1.2B
    types = [BF16, BF16, BF16, I32, BF16, "i32:16", "i32:16"]
    for name, tokens, block, is_decode in (("decode", 1, 128, True), ("prefill", 64, 64, False)):
        constants = [2048, 3, 2, tokens, block, is_decode, True]
        yield of(f"short_convolution.{name}", "short_convolution:convolution_kernel", types, constants)


_ROUTED = (F32, I32, "i32", "fp32")


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
        yield of(f"moe_route{name}", "topk_routing:_route_kernel", [F32, bias, *_ROUTED, bias], constants, 1)
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


def norm_variants() -> Iterator[Variant]:
    kernel, fp8, options = "ops.norm:_norm_kernel", [128, 448.0, 1e-10], {"num_warps": 4, "launch_pdl": True}
    for parts, only, own, weights in ((1, NONE, NONE, 1), (4, I32, NONE, 1), (4, NONE, F32, 3)):
        types = [BF16 if parts == 1 else F32, BF16, BF16, only, BF16, BF16, NONE, "fp32", "i32:16", own, "fp32", "fp32"]
        constants = [1536, 2048, parts, *fp8, True, weights]
        yield Variant(f"add_rms_norm.{parts}.{weights}", kernel, types, constants, options)
    last: list[object] = [2048, 2048, 1, *fp8, True]
    types = [BF16, NONE, BF16, NONE, BF16, NONE, NONE, "fp32", "i32:16", NONE, "fp32", "fp32"]
    yield Variant("rms_norm", kernel, types, last, options)
    types = [F32, BF16, BF16, NONE, f"*{FP8}", BF16, F32, "fp32", "i32:16", NONE, "fp32", "fp32"]
    yield Variant("norm_fp8", kernel, types, [4096, 4096, 4, *fp8, True], {**options, "num_warps": 16})


def small_variants() -> Iterator[Variant]:
    def of(
        name: str, kernel: str, types: list[str], constants: list[object], warps: int = 4, pdl: bool = True
    ) -> Variant:
        return Variant(name, f"ops.{kernel}", types, constants, {"num_warps": warps, "launch_pdl": pdl})

    fp8 = [128, 448.0, 1e-10]
    types = [BF16, f"*{FP8}", F32, "i32", "i32", "i32:16"]
    yield of("quantize", "quantize_rows:_quantize_kernel", types, [4096, 1024, 128, 1e-10, 448.0], pdl=False)
    yield of("silu_and_mul", "norm:_silu_kernel", [BF16, BF16, "i32:16", "i32:16"], [1024, True])
    types = [BF16, f"*{FP8}", F32, "i32", "i32:16"]
    yield of("silu_and_mul_fp8", "norm:_silu_fp8_kernel", types, [1024, *fp8, True])
    types = [BF16, BF16, BF16, "i32", "i32", "i32", "i32", "fp32"]
    yield of("head_norm", "qk_norm:_head_norm_kernel", types, [128, 128, 8, True])
    types = [BF16, F32, F32, "i32", "i32", "i32", "i32", "fp32"]
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
