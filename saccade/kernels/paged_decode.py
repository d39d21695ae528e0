"""Attention of one new token per request over paged keys and values. Knows block tables, not whose they are.

The keys of a request are shared out between programs (split KV), each request's own context evenly, so that the grid
depends on shapes alone and a CUDA graph may hold it. Query heads that share a key head are the rows of one product.

    cache of a layer [slots, kv_heads, d]         grid (kv_heads, splits, requests)

    request 0, table [7, 2, 5], context 40:       block 7            block 2            block 5
        keys in the order of the request          |0 ......... 15|16 ........ 31|32 .. 39|
        tiles of 16, three splits                  split 0        split 1        split 2
    request 1, context 9:                         |0 ..... 8|
                                                   split 0        nothing        nothing

    workspace [requests, kv_heads, splits, group, d]: what each split found. The last split to arrive at the
    counter of (request, kv head) adds them up, writes the result and sets the counter back to zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.softmax import LOG2_E, divide, precision_of, weigh
from saccade.kernels.tiles import Launch, power_of_two

_MAX_SPLITS = 64
# A split below this many keys costs more in the sum than it saves: reading 64 keys is one latency anyway.
_MIN_KEYS_PER_SPLIT = 64
# Programs per multiprocessor that keep the memory busy; more only make the sums longer.
_PROGRAMS_PER_SM = 2


class DecodeWorkspace(NamedTuple):
    """Scratch memory of `paged_decode`. One is enough for all layers; two streams need two."""

    mixed: Tensor  # float32 [requests * heads * splits * d]: sums of values, not yet divided
    maxima: Tensor  # float32 [requests * heads * splits]: largest score of each split
    sums: Tensor  # the same: sum of its weights
    counters: Tensor  # int32 [requests * kv_heads]: splits that have arrived; zero between launches

    @classmethod
    def allocate(
        cls, max_requests: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Room for any batch of up to `max_requests`, whatever its contexts."""
        sms = num_multiprocessors(device)
        rows = heads * max(n * choose_splits(n, kv_heads, 2**30, sms) for n in range(1, max_requests + 1))
        return cls(
            torch.empty(rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros(max_requests * kv_heads, dtype=torch.int32, device=device),
        )


def choose_splits(requests: int, kv_heads: int, max_context: int, multiprocessors: int) -> int:
    """A power of two: enough programs to fill the device, none with too few keys at the longest context."""
    wanted = _PROGRAMS_PER_SM * multiprocessors // (requests * kv_heads)
    useful = min(wanted, max_context // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 << (max(useful, 1).bit_length() - 1)


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: splits happen at all, with few programs
    return torch.cuda.get_device_properties(device).multi_processor_count


def paged_decode(
    q: Tensor,  # [requests, heads, d]; heads and d contiguous or not, the last dimension dense
    k_cache: Tensor,  # [slots, kv_heads, d]
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    context_lens: Tensor,  # int32 [requests], on the device; 0 for a row of padding, whose result is zero
    block_size: int,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    splits: int | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """[requests, heads, d]. The grid depends on shapes alone: batch size, and the longest context the tables hold."""
    requests, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if splits is None:
        splits = choose_splits(requests, kv_heads, block_tables.shape[1] * block_size, num_multiprocessors(q.device))
    launch = launch or launch_for(q)
    _check_room(workspace, requests, heads, kv_heads, dim, splits)
    out = torch.empty((requests, heads, dim), dtype=q.dtype, device=q.device)
    _decode_kernel[(kv_heads, splits, requests)](
        q, k_cache, v_cache, block_tables, context_lens, out,
        workspace.mixed, workspace.maxima, workspace.sums, workspace.counters,
        scale * LOG2_E, q.stride(0), k_cache.stride(0), v_cache.stride(0), block_tables.stride(0),
        Q_HEAD=q.stride(1), K_HEAD=k_cache.stride(1), V_HEAD=v_cache.stride(1), BLOCK_SIZE=block_size,
        GROUP=heads // kv_heads, DIM=dim, SPLITS=splits,
        ROWS=power_of_two(heads // kv_heads, least=launch.rows), PADDED_DIM=power_of_two(dim, least=16),
        KEYS=launch.keys, PRECISION=precision_of(q),
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers,
    )  # fmt: skip
    return out


def launch_for(q: Tensor) -> Launch:
    """16 rows are the least a matrix instruction takes; the group's heads seldom fill them, but reading is the work."""
    if q.element_size() == 4:
        return Launch(rows=16, keys=32, warps=4, stages=1)
    return Launch(rows=16, keys=64, warps=4, stages=3)


def _check_room(workspace: DecodeWorkspace, requests: int, heads: int, kv_heads: int, dim: int, splits: int) -> None:
    needed = requests * heads * splits * dim
    if needed > workspace.mixed.numel() or requests * kv_heads > workspace.counters.numel():
        raise ValueError(
            f"{requests} requests in {splits} splits need {needed} floats and {requests * kv_heads} counters; the"
            f" workspace has {workspace.mixed.numel()} and {workspace.counters.numel()}: allocate it for more requests"
        )


# Tables and numbers of a step change place and width from step to step; a variant for each would compile anew.
@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["block_tables", "context_lens"])
def _decode_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, block_tables: tl.tensor, context_lens: tl.tensor,
    out: tl.tensor, mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, counters: tl.tensor,
    scale: tl.tensor, q_row: tl.tensor, k_slot: tl.tensor, v_slot: tl.tensor, table_row: tl.tensor,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr,  # known, so that loads of a head are aligned
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + request)
    share = tl.maximum(tl.cdiv(tl.cdiv(context, KEYS), SPLITS), 1) * KEYS  # keys of a split, in whole tiles
    active = tl.maximum(tl.cdiv(context, share), 1)  # split 0 answers for an empty context too
    if split >= active:
        return
    end = tl.minimum((split + 1) * share, context)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    inside = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    own = q + request.to(tl.int64) * q_row + (head * GROUP + rows)[:, None] * Q_HEAD + dims[None, :]
    queries = tl.load(own, mask=inside, other=0.0)  # [ROWS, PADDED_DIM]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    table = block_tables + request.to(tl.int64) * table_row
    for first in range(split * share, end, KEYS):
        places = first + tl.arange(0, KEYS)
        known = places < end
        slots = slots_of(table, places, known, BLOCK_SIZE)
        # What lies beyond the context is not read at all: it may be another request's, or not a number.
        readable = known[:, None] & (dims < DIM)[None, :]
        k = tl.load(k_cache + slots[:, None] * k_slot + head * K_HEAD + dims[None, :], mask=readable, other=0.0)
        v = tl.load(v_cache + slots[:, None] * v_slot + head * V_HEAD + dims[None, :], mask=readable, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)  # [ROWS, KEYS]
        scores = tl.where(known[None, :], scores, float("-inf"))
        weights, shrink, largest, total = weigh(scores, scale, largest, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

    cell = request.to(tl.int64) * tl.num_programs(0) + head  # of the result and of the workspace
    result = out + (cell * GROUP + rows)[:, None] * DIM + dims[None, :]
    if active == 1:
        tl.store(result, divide(acc, total).to(out.dtype.element_ty), mask=inside)
    else:
        part = (cell * SPLITS + split) * GROUP + rows
        parts = mixed + part[:, None] * DIM + dims[None, :]
        _leave(parts, maxima + part, sums + part, acc, largest, total, inside, rows < GROUP)
        if tl.atomic_add(counters + cell, 1, sem="acq_rel") == active - 1:
            whole = _add_up(mixed, maxima, sums, cell, active, GROUP, DIM, SPLITS, ROWS, PADDED_DIM)
            tl.store(result, whole.to(out.dtype.element_ty), mask=inside)
            tl.store(counters + cell, 0)


@triton.jit
def _leave(
    parts: tl.tensor, maxima: tl.tensor, sums: tl.tensor, acc: tl.tensor, largest: tl.tensor, total: tl.tensor,
    inside: tl.tensor, is_row: tl.tensor,
) -> None:  # fmt: skip
    """What a split found, for the last one to add up. No thread goes on before all have stored."""
    tl.store(parts, acc, mask=inside)
    tl.store(maxima, largest, mask=is_row)
    tl.store(sums, total, mask=is_row)
    tl.debug_barrier()


@triton.jit
def slots_of(table: tl.tensor, places: tl.tensor, known: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Where a request's tokens lie: int64, for a cache may have more elements than 32 bits count."""
    blocks = tl.load(table + places // BLOCK_SIZE, mask=known, other=0)
    return blocks.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE


@triton.jit
def _add_up(
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, cell: tl.tensor, active: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The softmax over all splits of a request and key head: [ROWS, PADDED_DIM].

    Other multiprocessors wrote the parts, so they are read past the first cache.
    """
    rows, dims, splits = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM), tl.arange(0, SPLITS)
    inside = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    every = (cell * SPLITS + splits)[:, None] * GROUP + rows[None, :]  # [SPLITS, ROWS]
    present = (splits < active)[:, None] & (rows < GROUP)[None, :]
    each_largest = tl.load(maxima + every, mask=present, other=-1e30, cache_modifier=".cg")
    largest = tl.max(each_largest, 0)  # [ROWS]
    each_total = tl.load(sums + every, mask=present, other=0.0, cache_modifier=".cg")
    total = tl.sum(each_total * tl.exp2(each_largest - largest[None, :]), 0)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for split in range(active):
        part = (cell * SPLITS + split) * GROUP + rows
        own_largest = tl.load(maxima + part, mask=rows < GROUP, other=-1e30, cache_modifier=".cg")
        found = tl.load(mixed + part[:, None] * DIM + dims[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        acc += found * tl.exp2(own_largest - largest)[:, None]
    return divide(acc, total)
