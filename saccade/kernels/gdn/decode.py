"""A gated delta net for one new token per request, in one launch. Knows state rows, not whose they are.

grid (value_heads, T): a program has one head of one token, and its whole state [key, value] in registers

    past, new token ─► convolution, silu ─► q, k (L2 norm), v
    state S ─► read r = S^T (q, k) ─► d = beta (v - exp(g) k S)
            ├► written:  exp(g) S + k d
            └► output:   exp(g) q S + (q k) d ─► RMS norm * weight * silu(z) ─► out [T, value_heads * value]

The old S is read for q and k at once, so there is one pass over it and one reduction.

Value heads that share a key head all read the same inputs of the convolution (`past`). Each program counts itself
once it has read them; the last one shifts them and resets the counter. A value head's own inputs need no counter.

With PDL the state is read before the wait: only the step before wrote it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.gdn.layout import (
    GDNShape,
    GDNStates,
    GDNWeights,
    check,
    load_tile,
    log2_decay,
    sigmoid,
    silu,
    store_tile,
)
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two


class DecodeConfig(NamedTuple):
    warps: int = 4
    early: bool = True  # with PDL: read the state before the wait


def allocate_counters(max_tokens: int, shape: GDNShape, device: torch.device) -> Tensor:
    """Of programs that have read the inputs of a key head; zero between launches. Layers share them."""
    return torch.zeros(max_tokens, shape.key_heads, dtype=torch.int32, device=device)


def gdn_decode(
    projected: Tensor,  # [T, width]: rows of q, k, v, z, b, a, the last dimension dense
    rows: Tensor,  # int32 [T]: state row of each token; -1: padding, which is written as zeros
    shape: GDNShape,
    weights: GDNWeights,
    states: GDNStates,
    counters: Tensor,  # from `allocate_counters`
    *,
    out: Tensor | None = None,  # [T, value_heads * value], the last dimension dense
    config: DecodeConfig | None = None,
) -> Tensor:
    """[T, value_heads * value]; updates the states. Tokens with the same row overwrite each other's state."""
    check(shape, projected, weights, states)
    config = config or DecodeConfig()
    tokens = len(projected)
    assert len(rows) == tokens and counters.numel() >= tokens * shape.key_heads
    if out is None:
        out = projected.new_empty(tokens, shape.value_heads * shape.value_dim)
    keys, values = shape.padded
    pdl = supports_pdl(projected)
    _decode_kernel[(shape.value_heads, tokens)](
        projected, *weights[:4], *states, rows, counters, out, projected.stride(0), out.stride(0), weights.eps,
        *shape, KEYS=keys, VALUES=values, TAPS=power_of_two(shape.kernel - 1), EARLY=config.early, PDL=pdl,
        num_warps=config.warps, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _decode_kernel(
    projected: tl.tensor, conv: tl.tensor, decay: tl.tensor, decay_bias: tl.tensor, norm: tl.tensor,
    past: tl.tensor, memory: tl.tensor, rows: tl.tensor, counters: tl.tensor, out: tl.tensor,
    stride: tl.tensor, out_stride: tl.tensor, eps: tl.tensor,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KERNEL: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TAPS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    head = tl.program_id(0)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    token = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, KEYS)
    value = tl.arange(0, VALUES)
    in_value = value < VALUE
    both = tl.arange(0, 2 * KEYS)  # of q, then of k
    in_qk = both % KEYS < KEY
    of_qk = (both // KEYS * KEY_HEADS + key_head) * KEY + both % KEYS  # channels
    of_v = 2 * KEY_HEADS * KEY + head * VALUE + value
    x = projected + token * stride
    target = out + token * out_stride + head * VALUE + value
    row = tl.load(rows + token).to(tl.int64)
    if row < 0:
        pdl_release_then_wait(PDL)
        tl.store(target, tl.zeros([VALUES], out.dtype.element_ty), mask=in_value)
        return
    inputs = past + row * CHANNELS * (KERNEL - 1)
    places = memory + (row * VALUE_HEADS + head) * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    inside = (key < KEY)[:, None] & in_value[None, :]
    EXACT: tl.constexpr = KEY == KEYS and VALUE == VALUES
    if EARLY:
        state = load_tile(places, inside, EXACT)
    pdl_release_then_wait(PDL)
    if not EARLY:
        state = load_tile(places, inside, EXACT)
    q, k = _normed(_convolve(x, inputs, conv, of_qk, in_qk, CHANNELS, KERNEL), KEY, KEYS)
    v = _convolve(x, inputs, conv, of_v, in_value, CHANNELS, KERNEL)
    gates = x + CHANNELS + VALUE_HEADS * VALUE + head
    beta = sigmoid(tl.load(gates).to(tl.float32))
    keep = tl.exp2(log2_decay(tl.load(gates + VALUE_HEADS), tl.load(decay + head), tl.load(decay_bias + head)))
    read_k = tl.sum(state * k[:, None], 0)
    read_q = tl.sum(state * q[:, None], 0)
    d = beta * (v - keep * read_k)
    store_tile(places, keep * state + k[:, None] * d[None, :], inside, EXACT)
    out_row = keep * read_q + tl.sum(q * k, 0) * d
    out_row = _gated_norm(out_row, x + CHANNELS + head * VALUE, norm, eps, VALUE)
    tl.store(target, out_row.to(out.dtype.element_ty), mask=in_value)
    _shift(x, inputs, of_v, in_value, CHANNELS, KERNEL, TAPS)
    counter = counters + token * KEY_HEADS + key_head
    _shift_shared(counter, x, inputs, of_qk, in_qk, VALUE_HEADS // KEY_HEADS, CHANNELS, KERNEL, TAPS)


@triton.jit
def _convolve(
    x: tl.tensor, inputs: tl.tensor, conv: tl.tensor, channel: tl.tensor, inside: tl.tensor,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    total = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(conv + channel * KERNEL + KERNEL - 1, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(KERNEL - 1):
        by = tl.load(conv + channel * KERNEL + i, mask=inside, other=0.0).to(tl.float32)
        total += by * tl.load(inputs + i * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    return silu(total)


@triton.jit
def _normed(qk: tl.tensor, KEY: tl.constexpr, KEYS: tl.constexpr) -> tl.tuple:
    """L2 norms of a query and of the key after it, the query scaled: both [KEYS]."""
    qk = tl.reshape(qk, [2, KEYS])
    qk *= tl.rsqrt(tl.sum(qk * qk, 1) + 1e-6)[:, None]
    is_q = tl.arange(0, 2)[:, None] == 0
    q = tl.sum(tl.where(is_q, qk, 0.0), 0) * KEY**-0.5
    return q, tl.sum(tl.where(is_q, 0.0, qk), 0)


@triton.jit
def _gated_norm(row: tl.tensor, gate: tl.tensor, norm: tl.tensor, eps: tl.tensor, VALUE: tl.constexpr) -> tl.tensor:
    value = tl.arange(0, row.shape[0])
    z = tl.load(gate + value, mask=value < VALUE, other=0.0).to(tl.float32)
    by = tl.load(norm + value, mask=value < VALUE, other=0.0).to(tl.float32)
    return row * (tl.rsqrt(tl.sum(row * row, 0) / VALUE + eps) * by * silu(z))


@triton.jit
def _shift_shared(
    counter: tl.tensor, x: tl.tensor, inputs: tl.tensor, channel: tl.tensor, inside: tl.tensor,
    READERS: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Inputs that several programs read: the last of them shifts."""
    if READERS == 1:
        _shift(x, inputs, channel, inside, CHANNELS, KERNEL, TAPS)
    elif tl.atomic_add(counter, 1, sem="acq_rel") == READERS - 1:
        _shift(x, inputs, channel, inside, CHANNELS, KERNEL, TAPS)
        tl.store(counter, 0)


@triton.jit
def _shift(
    x: tl.tensor, inputs: tl.tensor, channel: tl.tensor, inside: tl.tensor,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr,
) -> None:  # fmt: skip
    """The oldest input leaves, the new token's comes in. Reads all of them before it writes, as the threads of a
    program may each hold the same elements; the barrier also ends the reads of `_convolve`."""
    tap = tl.arange(0, TAPS)[:, None]
    places = inputs + tap * CHANNELS + channel[None, :]
    later = tl.load(places + CHANNELS, mask=inside[None, :] & (tap < KERNEL - 2), other=0.0)
    new = tl.load(x + channel[None, :] + tl.zeros_like(tap), mask=inside[None, :] & (tap == KERNEL - 2), other=0.0)
    tl.debug_barrier()
    tl.store(places, tl.where(tap == KERNEL - 2, new, later), mask=inside[None, :] & (tap < KERNEL - 1))
