"""Compiles the kernels for Hopper GPUs without one: `python -m tests.helpers.compile_hopper NAME`, not interpreted."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from saccade.kernels.attention import decode_hopper, prefill_hopper, vit_hopper, vit_hopper_kernel
from saccade.kernels.attention.vit_schedule import KEYS
from saccade.kernels.gemm import hopper_act, hopper_qkv_rope, hopper_split_k, hopper_tiles

SHARED = 227 << 10  # bytes that a program may have of a multiprocessor


def boxes(dtype: str, rows: int, columns: int = 64) -> str:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=2)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> None:
    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    assert made.metadata.shared <= SHARED, (constants, made.metadata.shared)


def decode(dtype: str, parts: int) -> None:
    types = {name: boxes(dtype, 16) for name in ("keys", "values")}
    types |= dict.fromkeys(("slots", "tables", "contexts", "schedule", "counters"), "*i32")
    types |= {**dict.fromkeys(("cos", "sin", "k_cache", "v_cache", "out"), f"*{dtype}"), "scale": "fp32"}
    types |= {**dict.fromkeys(("qkv", "mixed", "maxima", "sums"), "*fp32"), "table_row": "i32", "part": "i32"}
    sizes = {"HEADS": 2, "GROUP": 6, "ROWS": 8, "BLOCK": 16, "STAGES": 3, "PARTS": parts}
    build(decode_hopper._decode_kernel, types, sizes, maxnreg=decode_hopper._REGISTERS, launch_pdl=True)


def linear(dtype: str) -> None:
    """Float16 is not tried when an engine starts."""
    types = {name: boxes(dtype, 64) for name in ("x", "weight", "out")}
    types |= {"bias": f"*{dtype}", **dict.fromkeys(("M", "N", "K", "whole", "halves"), "i32")}
    sizes = {"ACT": hopper_act.ACTS.index("silu_and_mul"), "HAS_BIAS": True}
    build(hopper_act._act_linear_kernel, types, sizes, maxnreg=168, launch_pdl=True)


def prefill(block: int) -> None:
    types = {name: boxes("bf16", block) for name in ("keys", "values")}
    types |= dict.fromkeys(("tables", "contexts", "starts", "index", "active"), "*i32")
    types |= {**dict.fromkeys(("q", "out"), "*bf16"), **dict.fromkeys(("mixed", "maxima", "sums"), "*fp32")}
    types |= {"scale": "fp32", **dict.fromkeys(("cells", "q_row", "table_row"), "i32")}
    sizes = {"Q_HEAD": 128, "HEADS": 6, "BLOCK": block, "KEYS": 128, "STAGES": 3, "MIN_SHARE": 4}
    build(prefill_hopper._prefill_kernel, types, sizes, maxnreg=168)


def qkv(dtype: str) -> None:
    sizes = {"long": [1, 32, 2, hopper_tiles.BOX], "short": [4, 8, 2, hopper_tiles.BOX]}
    types = {name: f"tensordesc<{dtype}{size},{hopper_qkv_rope._PAIRS!r}>" for name, size in sizes.items()}
    types |= {**dict.fromkeys(("x", "weight", "out"), boxes(dtype, 64)), "bias": f"*{dtype}", "rotary": "*fp32"}
    types |= dict.fromkeys(("M", "K", "whole", "halves"), "i32")
    build(hopper_qkv_rope._qkv_kernel, types, {"HEADS": 16}, maxnreg=168, launch_pdl=True)


def stream(rows: int) -> None:
    types = {"weight": boxes("bf16", 64), "x": boxes("bf16", rows), "M": "i32", "N": "i32"}
    for gated in (False, True):
        ring = hopper_split_k.choose_gated(rows) if gated else hopper_split_k.choose_parts(rows, 2048, 1536)
        ends = {"out": boxes("bf16", rows)} if gated else {"out": "*fp32", "bias": "*bf16"}
        sizes = {"K": 1536, "ROWS": rows, "OUTPUTS": 64, "STAGES": ring.stages, "SPLITS": ring.splits, "GATED": gated}
        constants = {**sizes, "bias": None} if gated else sizes
        registers = hopper_split_k._registers(rows, gated)
        build(hopper_split_k._stream_kernel, types | ends, constants, maxnreg=registers, launch_pdl=True)


def vit(dim: int, is_parted: bool) -> None:
    types = {"wide": boxes("bf16", KEYS), "narrow": boxes("bf16", KEYS, 16), "scale": "fp32", "heads": "i32"}
    types |= {**dict.fromkeys(("offsets", "items"), "*i32"), "out": "*bf16", "parts": "*fp32"}
    sizes = {"DIM": dim, "KEYS": KEYS, "STAGES": vit_hopper._STAGES, "IS_PARTED": is_parted}
    build(vit_hopper_kernel.vit_kernel, types, sizes, maxnreg=vit_hopper._REGISTERS, launch_pdl=True)


if __name__ == "__main__":
    {
        "decode": lambda: decode("bf16", 4),
        "linear": lambda: linear("fp16"),
        "prefill": lambda: prefill(16),
        "qkv": lambda: qkv("fp16"),
        "stream": lambda: stream(128),
        "vit": lambda: vit(80, False),
        "vit_parted": lambda: vit(80, True),
    }[sys.argv[1]]()
