"""FlashInfer's attention beside ours on a Hopper GPU: `python -m benchmarks.flashinfer_gpu`. The last line is JSON.

Right first (blocks scattered, what belongs to nobody not a number, replayed with other windows), then the time of a
layer, cold, in turns, and what planning a step costs the host. Shapes are those of Qwen2-VL-2B.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import flashinfer
import torch
from torch import Tensor

from benchmarks.kernels import (
    BLOCK,
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    KV_HEADS,
    Paged,
    attempt,
    error_of,
    graph_us,
    random,
    workspace_for,
)
from saccade.kernels.attention.prefill import PrefillAttention
from saccade.kernels.attention.prefill_flashinfer import Capacity, FlashInferPrefill
from saccade.kernels.attention.prefill_triton import choose_rows
from saccade.kernels.launch.device import Heads, num_sms
from saccade.kernels.launch.varlen_tiles import Tiles

SCALE = DIM**-0.5
WORKS = [  # new tokens of each request, their contexts
    ([1600], [1600]),
    ([2700], [23700]),
    ([300], [5300]),
    ([8192], [8192]),
    ([512], [512]),
    ([1600], [9600]),
    ([1600, 77, 512, 300], [1600, 77, 4096, 5000]),
]
Found = dict[str, Any]


def main() -> None:
    print(torch.cuda.get_device_name(), "FlashInfer", flashinfer.__version__, file=sys.stderr)
    torch.manual_seed(0)
    flash = new_flash()
    found: list[Found] = []
    for part in (check, time_prompts, time_planning, time_decode):
        for row in attempt(partial(part, flash)):
            found.append(row)
            print(row, flush=True)
    print(json.dumps(found))


def new_flash() -> FlashInferPrefill:
    start = time.perf_counter()
    capacity = Capacity(8192, 16, 16 * 2048)
    flash = FlashInferPrefill(Heads(HEADS, KV_HEADS, DIM), capacity, BLOCK, SCALE, DTYPE, DEVICE)
    print(f"made in {time.perf_counter() - start:.1f} s", flush=True)
    return flash


def blocks_of(paged: Paged) -> Tensor:
    return torch.cat([table[: -(-n // BLOCK)] for table, n in zip(paged.tables, paged.lens, strict=True)])


def plan(flash: FlashInferPrefill, paged: Paged, lengths: Sequence[int]) -> None:
    flash.plan(lengths, paged.lens, blocks_of(paged))


def ours(paged: Paged, lengths: Sequence[int], q: Tensor) -> Callable[[], Tensor]:
    attention = PrefillAttention.best(Heads(HEADS, KV_HEADS, DIM), DTYPE, BLOCK, DEVICE)
    tiles = Tiles.of(lengths, attention.rows(len(q)), DEVICE, seq_lens=paged.lens)
    return partial(attention, q, paged.k, paged.v, paged.tables, paged.seq_lens, tiles, SCALE)


def triton(paged: Paged, lengths: Sequence[int], q: Tensor) -> Callable[[], Tensor]:
    rows = choose_rows(len(q), HEADS, num_sms(DEVICE))
    return partial(paged.prefill, q, Tiles.of(lengths, rows, DEVICE, seq_lens=paged.lens))


# --- right --------------------------------------------------------------------------------------------------------


def poisoned(seq_lens: Sequence[int]) -> Paged:
    """Slots of no request are not a number."""
    paged = Paged.of(seq_lens)
    places = torch.arange(paged.tables.shape[1] * BLOCK, device=DEVICE)
    slots = paged.tables.long()[:, places // BLOCK] * BLOCK + places % BLOCK
    unused = slots[places >= paged.seq_lens[:, None]]
    paged.k[unused] = paged.v[unused] = float("nan")
    return paged


def check(flash: FlashInferPrefill) -> Iterator[Found]:
    for lengths, seq_lens in (
        ([1600, 1, 512, 77], [1600, 900, 4096, 77]),
        ([2700], [23700]),
        ([5, 16, 300, 64, 129], [5, 160, 5300, 64, 1000]),
    ):
        paged, qkv = poisoned(seq_lens), random(sum(lengths), HEADS + 2 * KV_HEADS, DIM)
        q = qkv[:, :HEADS]  # inside a merged projection, as the engine has it
        expected = paged.expected(q, lengths)
        plan(flash, paged, lengths)
        for name, out in (("ours", ours(paged, lengths, q)()), ("flashinfer", flash(q, paged.k, paged.v))):
            largest = float((out.float() - expected).abs().max())
            yield {"check": f"{lengths} of {seq_lens}", "by": name, "error": error_of(out, expected), "max": largest}
    yield replayed(flash)


def replayed(flash: FlashInferPrefill) -> Found:
    """Recorded with no window at all, replayed with three and rows of padding."""
    lengths, seq_lens = [700, 33, 129], [2000, 33, 640]
    paged, q = poisoned(seq_lens), random(1024, HEADS, DIM)
    flash.plan([], [], blocks_of(paged)[:0])
    flash(q, paged.k, paged.v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash(q, paged.k, paged.v)
    plan(flash, paged, lengths)
    graph.replay()
    rows = sum(lengths)
    return {"check": "replayed", "error": error_of(out[:rows], paged.expected(q[:rows], lengths))}


# --- how fast -----------------------------------------------------------------------------------------------------


def time_prompts(flash: FlashInferPrefill) -> Iterator[Found]:
    for lengths, seq_lens in WORKS:
        layers = [Paged.of(seq_lens) for _ in range(10)]
        for layer in layers:
            layer.tables.copy_(layers[0].tables)  # a request's blocks are the same in every layer
        q = random(sum(lengths), HEADS, DIM)
        plan(flash, layers[0], lengths)
        variants: dict[str, list[Callable[[], object]]] = {
            "ours": [ours(layer, lengths, q) for layer in layers],
            "ours, Triton": [triton(layer, lengths, q) for layer in layers],
            "flashinfer": [partial(flash, q, layer.k, layer.v) for layer in layers],
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(2):
            for name, calls in variants.items():
                times[name].append(round(graph_us(calls), 1))
        yield {"work": f"{lengths} of {seq_lens}", "us": times}


def time_planning(flash: FlashInferPrefill) -> Iterator[Found]:
    for lengths, seq_lens in WORKS[:5]:
        paged = Paged.of(seq_lens)
        blocks, times = blocks_of(paged), []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            flash.plan(lengths, seq_lens, blocks)
            times.append((time.perf_counter() - start) * 1e6)
        yield {"plan": f"{lengths} of {seq_lens}", "host us": sorted(times)[15]}


def time_decode(_: FlashInferPrefill) -> Iterator[Found]:
    """Ours turns and stores the new token, too; FlashInfer's finds it in the cache."""
    for requests in (1, 32, 128):
        layers = [Paged.of([1024] * requests) for _ in range(28)]
        q, workspace = random(requests, HEADS, DIM), workspace_for(requests)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "NHD", use_tensor_cores=True
        )
        pages = torch.arange(requests + 1, dtype=torch.int32) * (1024 // BLOCK)
        filled = torch.full((requests,), BLOCK, dtype=torch.int32)
        wrapper.plan(pages, blocks_of(layers[0]), filled, HEADS, KV_HEADS, DIM, BLOCK, q_data_type=DTYPE)
        caches = [tuple(c.view(-1, BLOCK, KV_HEADS, DIM) for c in (layer.k, layer.v)) for layer in layers]
        own = [partial(layer.decode, layer.new_tokens(q), workspace) for layer in layers]
        theirs = [partial(wrapper.run, q, cache) for cache in caches]
        yield {"decode": requests, "us": {"ours": graph_us(own), "flashinfer": graph_us(theirs)}}


if __name__ == "__main__":
    main()
