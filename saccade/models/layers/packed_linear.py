"""GEMMs over weights in oneDNN's blocked layout, for x86 and AArch64 CPUs. Knows no model.

A weight is packed once and replaces the original; on AArch64 it is a copy beside it, for several rows.
`F.linear` over the original is the reference.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Gemm = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., inputs], weight, bias) -> [..., outputs]"""

Lookup = Callable[[Tensor, Tensor], Tensor]
"""(token_ids [T], table) -> [T, inputs]"""

_MAX_STEP = 64  # between two padded row counts
_MAX_TRIED = 1 << 15  # columns
_BLOCK = 64  # rows of a weight that oneDNN interleaves, with AVX-512 in float32
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of sums of 64 values near 1


@lru_cache
def plain_reason(dtype: torch.dtype, device_type: str) -> str | None:
    """Why weights of this dtype stay as they are; None: they can be packed, and packed GEMMs are faster."""
    if device_type != "cpu":
        return "packed weights are for a CPU"
    if not (_is_x86() or is_aarch64()):
        return f"packed GEMMs were measured on x86_64 and aarch64, and this is {platform.machine()}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this PyTorch was built without oneDNN"
    if dtype not in _TOLERANCE:
        return f"{dtype} GEMMs are not packed"
    if dtype != torch.float32 and is_aarch64():
        return f"packed GEMMs of {dtype} were not measured on {platform.machine()}"
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        return "this CPU only emulates bfloat16, where packing does not help"
    return _failure(dtype)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it. oneDNN says so of any with AVX-512, and emulates them."""
    if not _is_x86():
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def is_aarch64() -> bool:
    """Where a packed GEMM of one row takes 1.5 to 2 times as long as a plain one, of more rows 0.4 to 0.9."""
    return platform.machine().lower() in ("aarch64", "arm64")


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> the same shape in a layout that only `packed_linear` reads."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


@lru_cache
def shares_rows(dtype: torch.dtype, inputs: int) -> bool:
    """Whether rows of a packed weight can be read, so that a tied head needs no table beside it.

    It is tried with a small weight. Widths that are none of a model's, whatever a config says, are not.
    """
    if dtype != torch.float32 or inputs > _MAX_TRIED or plain_reason(dtype, "cpu") is not None:
        return False
    weight = torch.arange(2.0 * _BLOCK * inputs).view(-1, inputs)
    return packed_rows(pack(weight), weight) is not None


def packed_rows(packed: Tensor, weight: Tensor) -> Tensor | None:
    """The memory of a packed weight as [blocks, inputs, _BLOCK], for `packed_lookup`.

    oneDNN does not promise this layout. None: it is another, as the first and last rows tell.

        rows 0 to 63:  w[0, 0] w[1, 0] ... w[63, 0]  w[0, 1] w[1, 1] ... w[63, 1]  ...
    """
    blocks = -(-len(weight) // _BLOCK)
    inputs = weight.shape[1]
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    size: int = torch.ops.mkldnn._nbytes(packed)
    if size != blocks * inputs * _BLOCK * weight.element_size():
        return None
    memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    memory.owner = packed  # type: ignore[attr-defined]  # lives as long as the view
    rows = torch.frombuffer(memory, dtype=weight.dtype).view(blocks, inputs, _BLOCK)
    ids = torch.arange(len(weight))
    ids = torch.cat((ids[: 2 * _BLOCK], ids[-2 * _BLOCK :]))
    return rows if torch.equal(packed_lookup(ids, rows), weight[ids]) else None


def packed_lookup(token_ids: Tensor, rows: Tensor) -> Tensor:
    """`F.embedding` in the rows of a packed weight."""
    return rows[token_ids // _BLOCK, :, token_ids % _BLOCK]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` over a packed weight.

    oneDNN builds code for each row count of each weight, which takes 1 to 16 ms and 0.6 MiB, and keeps the
    latest 1,024. So rows are padded to few counts.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    padded = padded_rows(count, weight.dtype)
    if padded != count:
        plain = rows
        rows = plain.new_empty(padded, plain.shape[1])
        rows[:count] = plain
        rows[count:] = 0
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out[:count].view(*x.shape[:-1], out.shape[1])


def linear_with_copy(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, packed: Tensor) -> Tensor:
    """One row over the plain weight, several over its packed copy."""
    if x.numel() == x.shape[-1]:
        return F.linear(x, weight, bias)
    return packed_linear(x, packed, bias)


def padded_rows(rows: int, dtype: torch.dtype) -> int:
    """1, 2, 4, 8; four counts in each doubling up to 64, then eight, or multiples of 64."""
    if rows <= 8:
        return max(1 << max(rows - 1, 0).bit_length(), _min_rows(dtype))
    step = min(1 << (rows - 1).bit_length() - (3 if rows <= 64 else 4), _MAX_STEP)
    return -(-rows // step) * step


@lru_cache
def _min_rows(dtype: torch.dtype) -> int:
    """One row of bfloat16 takes longer than two with AMX, since oneDNN has no AMX kernel for one."""
    return 2 if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else 1


def _failure(dtype: torch.dtype) -> str | None:
    """These are private operators of PyTorch, so they are tried once."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(2))
    try:
        out = packed_linear(x[:3], pack(weight))
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"packing failed ({next(iter(str(error).splitlines()), '')})"
    difference = (out - F.linear(x[:3], weight)).float().abs().max().item()
    if difference >= 8 * _TOLERANCE[dtype]:
        return f"packed GEMMs differ by {difference:.1g}"
    return None
