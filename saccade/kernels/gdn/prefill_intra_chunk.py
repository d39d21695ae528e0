"""First launch of a gated delta net over windows: all that a chunk needs and no state decides. Knows no state.

grid (value_heads, chunks): a program has one head of one chunk

    past, tokens ─► convolution, silu ─► q, k (L2 norm) ─► written, by one of the value heads that share them
                                      ─► v ─► beta v written, value-major
    a, b ─► g, beta ─► total = cumulated g ─► total, beta 2^total, 2^(end - total) written; end: after the chunk
    k k^T ─► system L[i, j] = beta_i 2^(total_i - total_j) k_i k_j, j < i ─► (I + L)^-1 written, transposed

The corrections of a chunk are d = (I + L)^-1 beta (v - 2^total k S) for the state S before it. Chunks are padded to 64
tokens with zeros, for which beta and g are 0, so that later launches need no masks over tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.gdn.layout import load_tile, log2_decay, sigmoid, silu, store_tile
from saccade.kernels.launch.pdl import pdl_release_then_wait

MIN_LOG2_DECAY = tl.constexpr(-60.0)  # 2^-60 = 1e-18 of a state is nothing beside the token's own


@triton.jit
def chunk_kernel(
    projected: tl.tensor, conv: tl.tensor, decay: tl.tensor, decay_bias: tl.tensor, past: tl.tensor, chunks: tl.tensor,
    q_out: tl.tensor, k_out: tl.tensor, v_out: tl.tensor, inverse_out: tl.tensor, gates_out: tl.tensor,
    stride: tl.tensor,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KERNEL: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    kind = k_out.dtype.element_ty
    head = tl.program_id(0)
    key_head = head // GROUP
    chunk = tl.program_id(1).to(tl.int64)
    pdl_release_then_wait(PDL)
    first = tl.load(chunks + chunk * 4)
    length = tl.load(chunks + chunk * 4 + 1)
    window = tl.load(chunks + chunk * 4 + 2)
    row = tl.load(chunks + chunk * 4 + 3).to(tl.int64)
    if (length == 0) | (row < 0):
        return
    rows = (projected, past + row * CHANNELS * (KERNEL - 1), first, length, window, stride)
    each = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    value = tl.arange(0, VALUES)
    of_head = chunk * VALUE_HEADS + head
    of_key_head = (chunk * KEY_HEADS + key_head) * CHUNK * KEY + each[:, None] * KEY + key[None, :]
    inside = (key < KEY)[None, :] & (each >= 0)[:, None]
    EXACT: tl.constexpr = KEY == KEYS and VALUE == VALUES

    of_k = KEY_HEADS * KEY + key_head * KEY + key  # channels
    k = _convolve(rows, conv, of_k, key < KEY, CHANNELS, CHUNK, KERNEL, EXACT)
    k = (k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]).to(kind)
    beta, total = _gates(projected + CHANNELS + VALUE_HEADS * VALUE, decay, decay_bias, first, length, head, stride,
                         VALUE_HEADS, CHUNK)  # fmt: skip
    _store_gates(gates_out, of_head, beta, total, CHUNK)
    inverse = _inverse_transposed(k, total, beta, kind, CHUNK, PRECISION)
    square = each[:, None] * CHUNK + each[None, :]
    tl.store(inverse_out + of_head * CHUNK * CHUNK + square, inverse.to(kind))

    of_v = 2 * KEY_HEADS * KEY + head * VALUE + value
    v = _convolve(rows, conv, of_v, value < VALUE, CHANNELS, CHUNK, KERNEL, EXACT)
    by_token = v_out + of_head * VALUE * CHUNK + value[:, None] * CHUNK + each[None, :]
    store_tile(by_token, tl.trans((v * beta[:, None]).to(kind)), (value < VALUE)[:, None] & (each >= 0)[None, :], EXACT)
    if head % GROUP == 0:
        store_tile(k_out + of_key_head, k, inside, EXACT)
    if head % GROUP == GROUP - 1:
        q = _convolve(rows, conv, key_head * KEY + key, key < KEY, CHANNELS, CHUNK, KERNEL, EXACT)
        q *= tl.rsqrt(tl.sum(q * q, 1) + 1e-6)[:, None] * KEY**-0.5
        store_tile(q_out + of_key_head, q.to(kind), inside, EXACT)


@triton.jit
def _convolve(
    rows: tl.tuple, conv: tl.tensor, channel: tl.tensor, valid: tl.tensor,
    CHANNELS: tl.constexpr, CHUNK: tl.constexpr, KERNEL: tl.constexpr, EXACT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """silu of the convolution: float32 [CHUNK, channels], zero after the chunk's tokens."""
    projected, inputs, first, length, window, stride = rows
    each = tl.arange(0, CHUNK)
    inside = (each < length)[:, None] & (channel >= 0)[None, :]
    if not EXACT:
        inside = inside & valid[None, :]
    total = tl.zeros([CHUNK, channel.shape[0]], tl.float32)
    for i in tl.static_range(KERNEL):
        token = (first + each - (KERNEL - 1 - i))[:, None]
        before = inputs + (token - window + KERNEL - 1) * CHANNELS  # the window's first token
        row = tl.where(token < window, before, projected + token.to(tl.int64) * stride)
        by = load_tile(conv + channel * KERNEL + i, valid, EXACT).to(tl.float32)
        total += tl.load(row + channel[None, :], mask=inside, other=0.0).to(tl.float32) * by[None, :]
    return silu(total)


@triton.jit
def _gates(
    gates: tl.tensor, decay: tl.tensor, decay_bias: tl.tensor, first: tl.tensor, length: tl.tensor, head: tl.tensor,
    stride: tl.tensor, VALUE_HEADS: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """beta and the cumulated log2 decay of each token: float32 [CHUNK]."""
    each = tl.arange(0, CHUNK)
    inside = each < length
    source = gates + (first + each).to(tl.int64) * stride + head
    b = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(source + VALUE_HEADS, mask=inside, other=0.0)
    g = log2_decay(a, tl.load(decay + head), tl.load(decay_bias + head))
    g = tl.maximum(g, MIN_LOG2_DECAY)  # sums of larger ones would lose the decay between other tokens
    return tl.where(inside, sigmoid(b), 0.0), tl.cumsum(tl.where(inside, g, 0.0), 0)


@triton.jit
def _store_gates(
    gates_out: tl.tensor, of_head: tl.tensor, beta: tl.tensor, total: tl.tensor, CHUNK: tl.constexpr
) -> None:
    each = tl.arange(0, CHUNK)
    end = tl.sum(tl.where(each == CHUNK - 1, total, 0.0), 0)
    gates = gates_out + of_head * 3 * CHUNK + each
    tl.store(gates, total)
    tl.store(gates + CHUNK, beta * tl.exp2(total))
    tl.store(gates + 2 * CHUNK, tl.exp2(end - total))


@triton.jit
def _system(k: tl.tensor, total: tl.tensor, beta: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """L, strictly lower: of one chunk, or of several smaller ones at once. k [.., n, key], total and beta [.., n]."""
    axis: tl.constexpr = len(total.shape) - 1
    n: tl.constexpr = total.shape[axis]
    each = tl.arange(0, n)
    later = each[:, None] > each[None, :]
    if axis == 1:
        later = later[None, :, :]
        across = tl.permute(k, (0, 2, 1))
    else:
        across = tl.trans(k)
    between = tl.exp2(tl.where(later, tl.expand_dims(total, axis + 1) - tl.expand_dims(total, axis), 0.0))
    scores = tl.dot(k, across, input_precision=PRECISION)
    return tl.where(later, scores * between * tl.expand_dims(beta, axis + 1), 0.0)


@triton.jit
def _inverse_transposed(
    k: tl.tensor, total: tl.tensor, beta: tl.tensor, kind: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """((I + L)^-1)^T: [SIZE, SIZE].

    Four blocks D on the diagonal are inverted together, from single entries up: blocks P and Q of one size, with N
    below P and beside Q, have the inverse [P^-1, 0; -Q^-1 N P^-1, Q^-1]. With the rest R of L and M = D^-1 R, which has
    M^4 = 0, the inverse is (I + M)^-1 D^-1 = (I - M) (I + M^2) D^-1.

    For keys of length 1 and beta <= 1 no entry is much larger than 1, so float16 serves the GEMMs: it has the mantissa
    of tf32, and is rounded instead of cut.
    """
    BASE: tl.constexpr = SIZE // 4
    narrow = tl.float32 if kind == tl.float32 else tl.float16
    each = tl.arange(0, BASE)
    row = each[None, :, None]
    column = each[None, None, :]
    blocks = _system(tl.reshape(k, [4, BASE, k.shape[1]]), tl.reshape(total, [4, BASE]), tl.reshape(beta, [4, BASE]),
                     PRECISION)  # fmt: skip
    solved = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -blocks, 0.0))
    for level in tl.static_range(1, 4):  # inverted so far: blocks of 2, 4, 8
        is_below = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        below = tl.where(is_below, blocks, 0.0)
        coupling = tl.dot(solved.to(narrow), below.to(narrow), input_precision=PRECISION)
        solved -= tl.dot(coupling.to(narrow), solved.to(narrow), input_precision=PRECISION)
    index = tl.arange(0, SIZE)
    below_blocks = tl.where(
        index[:, None] // BASE != index[None, :] // BASE, _system(k, total, beta, PRECISION), 0.0
    ).to(narrow)
    m = tl.dot(solved.to(narrow), tl.reshape(below_blocks, [4, BASE, SIZE]), input_precision=PRECISION)
    m = tl.reshape(m, [SIZE, SIZE])
    square = tl.dot(m.to(narrow), m.to(narrow), input_precision=PRECISION)
    series = square - m - tl.dot(m.to(narrow), square.to(narrow), input_precision=PRECISION)
    series = tl.where(index[:, None] == index[None, :], 1.0, series).to(narrow)  # M has nothing on the diagonal
    series = tl.reshape(tl.trans(series), [4, BASE, SIZE])
    across = tl.permute(solved.to(narrow), (0, 2, 1))
    return tl.reshape(tl.dot(across, series, input_precision=PRECISION), [SIZE, SIZE])
