"""Device side of `skinny_linear`: a weight is streamed once past a few rows. Knows tiles; their sizes are chosen there.

    weight [N, K]: program (tile, split) owns OUTPUTS rows and a share of the columns, and reads INPUTS at a time

                   |<--------------------- K --------------------->|
        tile 0     | split 0 | INPUTS | INPUTS | split 1 | ...     |   out[:, 0 .. OUTPUTS - 1]
        tile 1     |         |        |        |         |         |   out[:, OUTPUTS .. ]

    partials [tiles, SPLITS, OUTPUTS, ROWS]: what each split found. The last split to arrive at the counter of its tile
    adds them up in their order, writes the result and sets the counter back to zero.

The product is out^T = weight x^T: the weight's many rows are the wide side of a matrix instruction, those of x the
narrow one. Rows beyond the last of either are the last one again: loads need no masks, and what comes of it is dropped.

With a norm, x is multiplied by the norm's weight on its way and its squares are summed beside the products. What a row
is divided by is common to its products, so it comes last: rms_norm(x) W^T = ((x * g) W^T) * rsqrt(mean(x^2) + eps).

With EARLY, a program starts before the launch ahead of it has ended (see `early`). Until its turn it may touch nothing
that others write; weights are constant, so it may ask for its first ones, AHEAD cache lines of each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.launch.pdl import pdl_wait_then_release, prefetch_l2


@triton.jit
def vector_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, residual: tl.tensor, norm: tl.tensor, out: tl.tensor,
    eps: tl.tensor, N: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """One row of x, on the plain units: each thread multiplies the columns it loads; they add up once, at the end."""
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = weight + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K  # [OUTPUTS, 1]
    to_up = tl.cast(N, tl.int64) * K  # from a row of the gate to its row of `up`
    _prefetch_weights(own, to_up, GATED, AHEAD)
    pdl_wait_then_release(EARLY)
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    squares = tl.zeros([1, INPUTS], tl.float32)
    MASKED: tl.constexpr = K % INPUTS != 0
    for first in tl.range(0, K, INPUTS, num_stages=STAGES):
        inputs = first + tl.arange(0, INPUTS)[None, :]
        here = _load(x, inputs, K, MASKED, "").to(tl.float32)  # [1, INPUTS]
        if norm is not None:
            squares += here * here
            here *= _load(norm, inputs, K, MASKED, "").to(tl.float32)
        acc += _load(own, inputs, K, MASKED, "evict_first").to(tl.float32) * here
        if GATED:
            acc_up += _load(own + to_up, inputs, K, MASKED, "evict_first").to(tl.float32) * here
    total = tl.sum(squares, 1)  # [1]
    found = _scale_and_gate(tl.sum(acc, 1)[:, None], tl.sum(acc_up, 1)[:, None], total, norm, eps, K, GATED)
    _store(found, bias, residual, out, tl.arange(0, 1), columns, 1, N)


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, residual: tl.tensor, norm: tl.tensor, out: tl.tensor,
    partials: tl.tensor, squares: tl.tensor, counters: tl.tensor,
    eps: tl.tensor, M: tl.tensor, N: tl.tensor, x_row: tl.tensor,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Up to ROWS rows of x, on the matrix units."""
    tile, split = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = ((K + INPUTS - 1) // INPUTS + SPLITS - 1) // SPLITS * INPUTS  # columns of a split
    columns, rows = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    own = weight + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K  # [OUTPUTS, 1]
    to_up = tl.cast(N, tl.int64) * K  # from a row of the gate to its row of `up`
    _prefetch_weights(own + split * SHARE, to_up, GATED, AHEAD)
    pdl_wait_then_release(EARLY)
    few = x + tl.minimum(rows, M - 1)[:, None] * x_row  # [ROWS, 1]
    acc, acc_up, total = _multiply(
        few, own, own + to_up, norm, split * SHARE,
        SHARE, K, ROWS, OUTPUTS, INPUTS, SHARE * SPLITS != K, GATED, PRECISION,
    )  # fmt: skip
    if SPLITS == 1:
        _store(_scale_and_gate(acc, acc_up, total, norm, eps, K, GATED), bias, residual, out, rows, columns, M, N)
    else:
        cell = (tile * SPLITS).to(tl.int64) * ROWS  # the tile's first row in the workspace
        place = partials + cell * OUTPUTS + tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :]
        tl.store(place + split * OUTPUTS * ROWS, acc)
        tl.store(squares + cell + split * ROWS + rows, total)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            acc = _combine(place, OUTPUTS * ROWS, SPLITS)
            total = _combine(squares + cell + rows, ROWS, SPLITS)
            _store(_scale_and_gate(acc, acc, total, norm, eps, K, False), bias, residual, out, rows, columns, M, N)
            tl.store(counters + tile, 0)


@triton.jit
def _multiply(
    few: tl.tensor, gate: tl.tensor, up: tl.tensor, norm: tl.tensor, start: tl.tensor,
    SHARE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    MASKED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Products of the columns from `start` on [OUTPUTS, ROWS], those with `up`, and sums of x's squares [ROWS]."""
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    squares = tl.zeros([ROWS, INPUTS], tl.float32)  # each thread adds up its own; they meet once, at the end
    for first in range(0, SHARE, INPUTS):
        inputs = start + first + tl.arange(0, INPUTS)[None, :]
        here = _load(few, inputs, K, MASKED, "")  # [ROWS, INPUTS]
        if norm is not None:
            exact = here.to(tl.float32)
            squares += exact * exact
            here = (exact * _load(norm, inputs, K, MASKED, "").to(tl.float32)).to(here.dtype)
        weights = _load(gate, inputs, K, MASKED, "evict_first")  # [OUTPUTS, INPUTS]
        acc = tl.dot(weights, tl.trans(here), acc, input_precision=PRECISION)
        if GATED:
            weights = _load(up, inputs, K, MASKED, "evict_first")
            acc_up = tl.dot(weights, tl.trans(here), acc_up, input_precision=PRECISION)
    return acc, acc_up, tl.sum(squares, 1)


@triton.jit
def _prefetch_weights(own: tl.tensor, to_up: tl.tensor, GATED: tl.constexpr, AHEAD: tl.constexpr) -> None:
    """The first AHEAD cache lines of each weight row."""
    if AHEAD > 0:
        of_line: tl.constexpr = 1024 // own.dtype.element_ty.primitive_bitwidth  # elements
        lines = own + tl.arange(0, AHEAD)[None, :] * of_line  # [OUTPUTS, AHEAD]
        prefetch_l2(lines)
        if GATED:
            prefetch_l2(lines + to_up)


@triton.jit
def _load(row: tl.tensor, inputs: tl.tensor, K: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr) -> tl.tensor:
    """Columns `inputs` of rows; zero beyond K. Weights are read once: "evict_first", and leave the cache to others."""
    if MASKED:
        found = tl.load(row + inputs, mask=inputs < K, other=0.0, eviction_policy=POLICY)
    else:
        found = tl.load(row + inputs, eviction_policy=POLICY)
    return found


@triton.jit
def _scale_and_gate(
    found: tl.tensor, up: tl.tensor, squares: tl.tensor, norm: tl.tensor, eps: tl.tensor,
    K: tl.constexpr, GATED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[OUTPUTS, ROWS]: what the norm divides by, and silu(gate) * up."""
    if norm is not None:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        found *= scale
        up *= scale
    if GATED:
        found = found * tl.sigmoid(found) * up
    return found


@triton.jit
def _combine(first: tl.tensor, step: tl.constexpr, SPLITS: tl.constexpr) -> tl.tensor:
    """Other multiprocessors wrote the parts, so they are read past the first cache; always in the same order."""
    total = tl.load(first, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(first + split * step, cache_modifier=".cg")
    return total


@triton.jit
def _store(
    found: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, M: tl.tensor, N: tl.tensor,
) -> None:  # fmt: skip
    """found [OUTPUTS, ROWS] -> out [M, N], with bias [N] and residual [M, N] where there are any."""
    inside = (columns < N)[:, None] & (rows < M)[None, :]
    place = rows[None, :].to(tl.int64) * N + columns[:, None]
    if bias is not None:
        found += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        found += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)
