"""Last launches of a gated delta net over windows: outputs of all chunks, and the next inputs of the convolution.

output_kernel, grid (value_heads, chunks): a program has one head of one chunk

    2^total q S + (q k^T decayed) d ─► RMS norm * weight * silu(z) ─► out [T, value_heads * value]

past_kernel, grid (channel blocks, pieces): a program walks the pieces of a window as the scan does

    | past: kernel - 1 inputs | tokens of the window ........................ |
                                        piece ends ^ ─► the last inputs, copied to the row `keep`
                                                                window ends ^ ─► the last inputs, to its own row
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.gdn.layout import last_piece, silu
from saccade.kernels.launch.pdl import pdl_release_then_wait


@triton.jit
def output_kernel(
    projected: tl.tensor, norm: tl.tensor, chunks: tl.tensor, q_in: tl.tensor, k_in: tl.tensor, d_in: tl.tensor,
    gates_in: tl.tensor, states_in: tl.tensor, out: tl.tensor, stride: tl.tensor, out_stride: tl.tensor, eps: tl.tensor,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    kind = k_in.dtype.element_ty
    head = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    value = tl.arange(0, VALUES)
    by = tl.load(norm + value, mask=value < VALUE, other=0.0).to(tl.float32)
    pdl_release_then_wait(PDL)
    first = tl.load(chunks + chunk * 4)
    length = tl.load(chunks + chunk * 4 + 1)
    row = tl.load(chunks + chunk * 4 + 3)
    if length == 0:
        return
    token = (first + each).to(tl.int64)[:, None]
    inside = (each < length)[:, None] & (value < VALUE)[None, :]
    target = out + token * out_stride + head * VALUE + value[None, :]
    if row < 0:  # padding
        tl.store(target, tl.zeros([CHUNK, VALUES], out.dtype.element_ty), mask=inside)
        return
    of_head = chunk * VALUE_HEADS + head
    of_key_head = (chunk * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * CHUNK * KEY
    in_keys = (each >= 0)[:, None] & (key < KEY)[None, :]
    in_values = (value < VALUE)[:, None]
    q = tl.load(q_in + of_key_head + each[:, None] * KEY + key[None, :], mask=in_keys, other=0.0)
    k = tl.load(k_in + of_key_head + each[:, None] * KEY + key[None, :], mask=in_keys, other=0.0)
    total = tl.load(gates_in + of_head * 3 * CHUNK + each)
    not_after = each[:, None] >= each[None, :]
    between = tl.exp2(tl.where(not_after, total[:, None] - total[None, :], 0.0))
    scores = tl.where(not_after, tl.dot(q, tl.trans(k), input_precision=PRECISION) * between, 0.0)
    source = states_in + (of_head * VALUE + value[:, None]) * KEY + key[None, :]
    state = tl.load(source, mask=in_values & (key < KEY)[None, :], other=0.0)
    rows = tl.dot(q, tl.trans(state), input_precision=PRECISION) * tl.exp2(total)[:, None]
    d = tl.load(d_in + (of_head * VALUE + value[:, None]) * CHUNK + each[None, :], mask=in_values, other=0.0)
    rows = tl.dot(scores.to(kind), tl.trans(d), rows, input_precision=PRECISION)
    gate = projected + token * stride + 2 * KEY_HEADS * KEY + (VALUE_HEADS + head) * VALUE + value[None, :]
    z = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(rows * rows, 1) / VALUE + eps)
    rows = rows * scale[:, None] * by[None, :] * silu(z)
    tl.store(target, rows.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["starts", "rows", "keep"])
def past_kernel(
    projected: tl.tensor, past: tl.tensor, starts: tl.tensor, rows: tl.tensor, keep: tl.tensor,
    stride: tl.tensor, pieces: tl.tensor,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    piece = tl.program_id(1)
    row = tl.load(rows + piece).to(tl.int64)
    before = tl.load(rows + piece - 1, mask=piece > 0, other=-1)
    pdl_release_then_wait(PDL)
    if (row < 0) | (row == before):
        return
    last = last_piece(rows, piece, row, pieces, PIECES)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tap = tl.arange(0, TAPS)[:, None]
    inside = (channel < CHANNELS) & (tap < KERNEL - 1)
    places = tap * CHANNELS + channel
    start = tl.load(starts + piece)
    inputs = past + row * CHANNELS * (KERNEL - 1) + channel
    for index in range(piece, last):
        copy = tl.load(keep + index).to(tl.int64)
        if copy >= 0:
            taps = last_inputs(projected, inputs, start, tl.load(starts + index + 1), channel, tap, inside, stride,
                               CHANNELS, KERNEL, GATE)  # fmt: skip
            tl.store(past + copy * CHANNELS * (KERNEL - 1) + places, taps, mask=inside)
    taps = last_inputs(projected, inputs, start, tl.load(starts + last), channel, tap, inside, stride,
                       CHANNELS, KERNEL, GATE)  # fmt: skip
    tl.debug_barrier()  # all old inputs are read
    tl.store(past + row * CHANNELS * (KERNEL - 1) + places, taps, mask=inside)


@triton.jit
def gated_input(place: tl.tensor, inside: tl.tensor, GATE: tl.constexpr) -> tl.tensor:
    """What a convolution reads: what was projected, times what stands GATE values after it; 0: as it is."""
    x = tl.load(place, mask=inside, other=0.0)
    if GATE:
        gate = tl.load(place + GATE, mask=inside, other=0.0)
        x = (x.to(tl.float32) * gate.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def last_inputs(
    projected: tl.tensor, inputs: tl.tensor, start: tl.tensor, end: tl.tensor, channel: tl.tensor, tap: tl.tensor,
    inside: tl.tensor, stride: tl.tensor, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, GATE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The KERNEL - 1 inputs of the convolution before the token `end` of a window that begins at `start`."""
    token = end - (KERNEL - 1) + tap
    new = gated_input(projected + token.to(tl.int64) * stride + channel, inside & (token >= start), GATE)
    old = tl.load(inputs + (token - start + KERNEL - 1) * CHANNELS, mask=inside & (token < start), other=0.0)
    return tl.where(token >= start, new, old)
