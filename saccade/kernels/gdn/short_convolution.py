"""Short convolutions between two gates: one launch for one token of each request; for windows, one and `store_past`.

projected [T, row stride]   | before | after | x |    channels each
past [rows, kernel - 1, channels] in memory: the last values of before * x, oldest first

grid (channel blocks, tokens or chunks): out = after * convolved(before * x). A program that has one token owns its
channels of the state, and shifts them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.gdn.prefill import store_past
from saccade.kernels.gdn.prefill_output import gated_input, last_inputs
from saccade.kernels.gdn.prefill_plan import CHUNK, ChunkPlan
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

_DECODE_CHANNELS = 128  # of a program
_PREFILL_CHANNELS = 64


def convolution_decode(
    projected: Tensor,  # [T, 3 * channels], the last dimension dense
    rows: Tensor,  # int32 [T]: state row of each token; -1: padding, which is written as zeros
    weight: Tensor,  # [channels, 1, kernel]
    past: Tensor,  # [rows, channels, kernel - 1] in the model's type; channels are dense: a transposed view
    out: Tensor | None = None,  # [T, channels], the last dimension dense
) -> Tensor:
    """[T, channels]; updates `past`. Tokens with the same row overwrite each other's state."""
    assert len(rows) == len(projected)
    return _launch(projected, rows, weight, past, out, len(rows), (1, _DECODE_CHANNELS, True))


def convolution_prefill(
    projected: Tensor, plan: ChunkPlan, weight: Tensor, past: Tensor, out: Tensor | None = None
) -> Tensor:
    """The same for the packed windows of a plan, with copies of `past` for checkpoints."""
    tile = (CHUNK, _PREFILL_CHANNELS, False)
    out = _launch(projected, plan.chunks, weight, past, out, len(plan.chunks), tile)
    store_past(projected, past, plan, gate=2 * past.shape[1])
    return out


def _launch(
    projected: Tensor, places: Tensor, weight: Tensor, past: Tensor, out: Tensor | None, count: int,
    tile: tuple[int, int, bool],
) -> Tensor:  # fmt: skip
    _, channels, taps = past.shape
    assert taps > 0 and weight.shape == (channels, 1, taps + 1) and weight.is_contiguous()
    assert projected.shape[1] == 3 * channels and projected.stride(1) == 1 and past.dtype == projected.dtype
    assert past.transpose(1, 2).is_contiguous(), "channels must be dense: allocate [rows, kernel - 1, channels]"
    out = projected.new_empty(len(projected), channels) if out is None else out
    pdl = supports_pdl(projected)
    convolution_kernel[(triton.cdiv(channels, tile[1]), count)](
        projected, weight, past, places, out, projected.stride(0), out.stride(0), channels, taps + 1,
        power_of_two(taps), *tile, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["places"])
def convolution_kernel(
    projected: tl.tensor, weight: tl.tensor, past: tl.tensor, places: tl.tensor, out: tl.tensor,
    stride: tl.tensor, out_stride: tl.tensor,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    DECODE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`places`: the state row of each token, or the chunks of a plan."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    known = channel < CHANNELS
    first = tl.program_id(1).to(tl.int64)
    pdl_release_then_wait(PDL)
    if DECODE:
        row = tl.load(places + first).to(tl.int64)
        length = 1
        start = first
    else:
        chunk = places + first * 4
        row = tl.load(chunk + 3).to(tl.int64)
        length = tl.load(chunk + 1)
        start = tl.load(chunk + 2).to(tl.int64)  # of the window
        first = tl.load(chunk).to(tl.int64)
    token = first + tl.arange(0, TOKENS)[:, None]
    inside = (token < first + length) & known
    target = out + token * out_stride + channel
    if row < 0:
        tl.store(target, tl.zeros([TOKENS, BLOCK], out.dtype.element_ty), mask=inside)
        return
    inputs = past + row * CHANNELS * (KERNEL - 1) + channel
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for i in tl.static_range(KERNEL):
        at = token - (KERNEL - 1) + i
        new = gated_input(projected + at * stride + channel, inside & (at >= start), 2 * CHANNELS)
        old = tl.load(inputs + (at - start + KERNEL - 1) * CHANNELS, mask=inside & (at < start), other=0.0)
        by = tl.load(weight + channel * KERNEL + i, mask=known, other=0.0).to(tl.float32)
        total += by * tl.where(at >= start, new, old).to(tl.float32)
    after = tl.load(projected + token * stride + CHANNELS + channel, mask=inside, other=0.0)
    tl.store(target, (after.to(tl.float32) * total).to(out.dtype.element_ty), mask=inside)
    if DECODE:
        tap = tl.arange(0, TAPS)[:, None]
        inside = known & (tap < KERNEL - 1)
        taps = last_inputs(projected, inputs, start, start + 1, channel, tap, inside, stride, CHANNELS, KERNEL,
                           2 * CHANNELS)  # fmt: skip
        tl.debug_barrier()  # all old inputs are read
        tl.store(inputs + tap * CHANNELS, taps, mask=inside)
