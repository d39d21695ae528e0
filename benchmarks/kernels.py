"""The kernels on a GPU: right to the rounding of bfloat16, and how far from the floor. `python -m benchmarks.kernels`

Shapes are those of Qwen2-VL-2B. A part that fails prints the end of its traceback, and the next one runs. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.attention.prefill_triton import paged_prefill
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.attention.vit_triton import packed_vit
from saccade.kernels.launch.varlen_tiles import Launch, Tiles
from saccade.kernels.ops import reference
from saccade.kernels.ops.norm import add_rms_norm, silu_and_mul
from saccade.models.layers.torch_attention import AttentionBatch, reference_attention, reference_packed_attention

DEVICE, DTYPE, BLOCK = torch.device("cuda"), torch.bfloat16, 16
HEADS, KV_HEADS, DIM, HIDDEN, WIDE = 12, 2, 128, 1536, 8960
VIT_HEADS, VIT_DIM = 16, 80
BYTES_PER_S, FLOPS = 4.0e12, 800e12  # reachable on an H200, whose peaks are 4.8e12 and 990e12
MAX_ERROR = 1e-2  # relative, of bfloat16 operands
COLD_BYTES = 200e6  # four times the L2: what is read in a row until something is read again

Call = Callable[[], object]
T = TypeVar("T")

# The first two of each are the defaults.
PREFILL_LAUNCHES = [Launch(64, 64, 4, 5), Launch(64, 128, 4, 5), Launch(128, 64, 8, 5)]
VIT_LAUNCHES = [Launch(128, 64, 8, 3, 128), Launch(64, 64, 4, 3), Launch(128, 128, 8, 3), Launch(64, 64, 4, 2, 128)]
DECODE_LAUNCHES = [Launch(16, 128, 4, 1), Launch(16, 64, 4, 5), Launch(16, 128, 8, 3), Launch(16, 128, 4, 3)]


class Row(NamedTuple):
    work: str
    variant: str
    us: float  # of one launch
    floor_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="correctness and default launches only")
    sweep = not parser.parse_args().quick
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, file=sys.stderr)
    started = time.perf_counter()
    errors = dict(check_all())
    for name, error in errors.items():
        print(f"{name:34} relative error {error:.1e} {'' if error < MAX_ERROR else 'WRONG'}", flush=True)
    rows: list[Row] = []
    for timing in TIMINGS:
        for row in attempt(partial(timing, sweep)):
            rows.append(row)
            print(f"{row.work:26} {row.variant:34} {row.us:9.2f} us  floor {row.floor_us:8.2f}"
                  f"  x{row.us / row.floor_us:6.2f}", flush=True)  # fmt: skip
    print(f"{time.perf_counter() - started:.0f} s")
    print(json.dumps({"errors": errors, "rows": [row._asdict() for row in rows]}))


def attempt(part: Callable[[], Iterator[T]]) -> Iterator[T]:
    """What a part yields until it fails, if it does."""
    try:
        yield from part()
    except Exception:
        print("FAILED:", "".join(traceback.format_exc().splitlines(keepends=True)[-12:]), flush=True)
        torch.cuda.synchronize()


def check_all() -> Iterator[tuple[str, float]]:
    """Side by side, for most of the time goes into compiling. Nothing else may run while a graph is recorded."""
    with ThreadPoolExecutor() as pool:
        for results in pool.map(lambda check: list(attempt(check)), CHECKS):
            yield from results
    yield from attempt(check_decode_in_a_graph)


# --- inputs -------------------------------------------------------------------------------------------------------


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


class Paged(NamedTuple):
    """One layer's cache and the requests in it, their blocks scattered."""

    k: Tensor
    v: Tensor
    tables: Tensor
    seq_lens: Tensor
    lens: list[int]

    @classmethod
    def of(cls, seq_lens: Sequence[int], kv_heads: int = KV_HEADS, dim: int = DIM) -> Paged:
        per_request = max(1, math.ceil(max(seq_lens) / BLOCK))
        order = torch.randperm(per_request * len(seq_lens), device=DEVICE, dtype=torch.int32)
        k, v = (random(len(order) * BLOCK, kv_heads, dim) for _ in range(2))
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        return cls(k, v, order.view(len(seq_lens), -1), lens, list(seq_lens))

    def new_tokens(self, q: Tensor) -> NewTokens:
        """The latest token of each request: what the cache has of it, not turned."""
        last = (self.seq_lens.long() - 1).clamp(min=0)
        slots = self.tables.long().gather(1, last[:, None] // BLOCK)[:, 0] * BLOCK + last % BLOCK
        qkv = torch.cat((q, self.k[slots], self.v[slots]), dim=1)
        cos, sin = torch.ones_like(qkv[:, 0]), torch.zeros_like(qkv[:, 0])
        return NewTokens(qkv, cos, sin, torch.where(self.seq_lens > 0, slots, -1).int())

    def decode(self, new: NewTokens, workspace: DecodeWorkspace, **options: object) -> Tensor:
        scale = new.qkv.shape[-1] ** -0.5
        return paged_decode(new, self.k, self.v, self.tables, self.seq_lens, BLOCK, scale, workspace, **options)  # type: ignore[arg-type]

    def prefill(self, q: Tensor, tiles: Tiles, launch: Launch | None = None) -> Tensor:
        scale = q.shape[-1] ** -0.5
        return paged_prefill(q, self.k, self.v, self.tables, self.seq_lens, tiles, BLOCK, scale, launch=launch)

    def expected(self, q: Tensor, lengths: list[int]) -> Tensor:
        batch = AttentionBatch(lengths, self.lens, self.tables.long(), self.seq_lens, BLOCK)
        return reference_attention(q.float(), self.k.float(), self.v.float(), batch, q.shape[-1] ** -0.5)


def workspace_for(requests: int, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> DecodeWorkspace:
    """Larger than the default's, for splits that are only tried."""
    rows = requests * heads * 64
    mixed, maxima, sums = (torch.full((n,), float("nan"), device=DEVICE) for n in (rows * dim, rows, rows))
    return DecodeWorkspace(mixed, maxima, sums, torch.zeros(requests * kv_heads, dtype=torch.int32, device=DEVICE))


# --- correctness --------------------------------------------------------------------------------------------------

Checked = Iterator[tuple[str, float]]


def error_of(found: Tensor, expected: Tensor) -> float:
    """NaN becomes infinite, so that no comparison lets it pass."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    return math.inf if math.isnan(error) else error


def check_decode() -> Checked:
    seq_lens = [1, 17, 1024, 700, 64, 65, 4000]
    for dim in (64, 80, 96, 128):
        for heads, kv_heads in ((12, 2), (8, 8)):
            paged, q = Paged.of(seq_lens, kv_heads, dim), random(len(seq_lens), heads, dim)
            workspace = DecodeWorkspace.allocate(len(seq_lens), heads, kv_heads, dim, DEVICE)
            expected = paged.expected(q, [1] * len(seq_lens))
            new = paged.new_tokens(q)
            worst = max(error_of(paged.decode(new, workspace), expected) for _ in range(20))  # a race would move
            yield f"decode d {dim}, {heads}/{kv_heads} heads", worst


def check_decode_in_a_graph() -> Checked:
    """Recorded with one set of contexts, replayed with another, a row of padding among them."""
    paged, q = Paged.of([1000] * 4), random(4, HEADS, DIM)
    workspace = DecodeWorkspace.allocate(4, HEADS, KV_HEADS, DIM, DEVICE)
    new = paged.new_tokens(q)
    paged.decode(new, workspace)
    lens, some, graph = [5, 0, 999, 130], [0, 2, 3], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged.decode(new, workspace)
    paged.seq_lens.copy_(torch.tensor(lens))
    for recorded, other in zip(new, paged.new_tokens(q), strict=True):
        recorded.copy_(other)
    graph.replay()
    left = Paged(paged.k, paged.v, paged.tables[some], paged.seq_lens[some], [lens[i] for i in some])
    yield "decode replayed, other contexts", error_of(out[some], left.expected(q[some], [1] * 3))
    yield "decode of padding (0 expected)", float(out[1].abs().max())


def check_prefill() -> Checked:
    lengths, seq_lens = [1600, 1, 512, 77], [1600, 900, 4096, 77]
    for dim in (64, 80, 128):
        paged, q = Paged.of(seq_lens, KV_HEADS, dim), random(sum(lengths), HEADS, dim)
        expected = paged.expected(q, lengths)
        for rows in (64, 128):
            tiles = Tiles.of(lengths, rows, DEVICE, seq_lens=seq_lens, capacity=100)
            yield f"prefill d {dim}, {rows} rows", error_of(paged.prefill(q, tiles), expected)


def check_vit() -> Checked:
    lengths = [300, 1564, 1, 64, 129]
    for dim in (64, 72, 80, 128):
        q, k, v = random(sum(lengths), 3, 4, dim).unbind(1)
        expected = reference_packed_attention(q.float(), k.float(), v.float(), lengths, dim**-0.5)
        for rows in (64, 128):
            found = packed_vit(q, k, v, Tiles.of(lengths, rows, DEVICE), dim**-0.5)
            yield f"pictures d {dim}, {rows} rows", error_of(found, expected)


def check_small() -> Checked:
    x, residual, weight = random(33, HIDDEN), random(33, HIDDEN), random(HIDDEN)
    pairs = zip(add_rms_norm(x, residual, weight, 1e-6), reference.add_rms_norm(x, residual, weight, 1e-6), strict=True)
    yield "add_rms_norm", max(error_of(found, expected) for found, expected in pairs)
    gate_up = random(33, 2 * WIDE)
    yield "silu_and_mul", error_of(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    found, expected = stored(33), stored(33)
    for ours, theirs in zip(found, expected, strict=True):
        theirs.copy_(ours)
    rotary_and_store(*found)
    reference.rotary_and_store(*expected)
    worst = max(error_of(ours, theirs) for ours, theirs in zip(found[:-1], expected[:-1], strict=True))
    yield "rotary_and_store", worst


def stored(tokens: int) -> tuple[Tensor, ...]:
    """Arguments of `rotary_and_store`: q, k, v of one projection, angles, caches, slots with one of padding."""
    qkv = random(tokens, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = random(2, tokens, 1, DIM)
    k_cache, v_cache = random(2, 4 * tokens, KV_HEADS, DIM)
    slots = torch.randperm(4 * tokens, device=DEVICE)[:tokens]
    slots[tokens // 2] = -1
    return q, k, v, cos, sin, k_cache, v_cache, slots


# --- times --------------------------------------------------------------------------------------------------------

Timed = Iterator[Row]


def graph_us(calls: Sequence[Call]) -> float:
    """Median time of one call in a CUDA graph of all of them, which read different memory."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times) / len(calls)


def copies(size: float, maximum: int = 160) -> int:
    """How many inputs of `size` bytes pass through the L2 before one comes again."""
    return min(max(4, math.ceil(COLD_BYTES / size)), maximum)


def measure(work: str, variants: Mapping[str, Sequence[Call]], floor_us: float) -> Timed:
    """A row for each variant that runs. All are compiled first, side by side; what fails then fails again below."""
    with ThreadPoolExecutor() as pool:
        for compiled in [pool.submit(calls[0]) for calls in variants.values()]:
            compiled.exception()
    for variant, calls in variants.items():
        yield from attempt(partial(_row, work, variant, calls, floor_us))


def _row(work: str, variant: str, calls: Sequence[Call], floor_us: float) -> Timed:
    yield Row(work, variant, graph_us(calls), floor_us)


def time_decode(sweep: bool) -> Timed:
    for requests, splits in ((1, (8, 32)), (32, (2, 8)), (128, (2, 4))):
        yield from _time_decode(requests, splits if sweep else (), DECODE_LAUNCHES if sweep else ())


def _time_decode(requests: int, splits: Sequence[int], launches: Sequence[Launch], context: int = 1024) -> Timed:
    size = 2 * requests * context * KV_HEADS * DIM * DTYPE.itemsize
    layers = [Paged.of([context] * requests) for _ in range(copies(size))]
    workspace, news = workspace_for(requests), [layer.new_tokens(random(requests, HEADS, DIM)) for layer in layers]
    variants: dict[str, dict[str, object]] = {"default": {}}
    variants |= {f"splits {n}": {"splits": n} for n in splits}
    variants |= {_name(launch): {"launch": launch} for launch in launches}
    calls = {
        name: [partial(layer.decode, new, workspace, **options) for layer, new in zip(layers, news, strict=True)]
        for name, options in variants.items()
    }
    yield from measure(f"decode batch {requests}, 1k", calls, size / BYTES_PER_S * 1e6)


def time_prefill(sweep: bool) -> Timed:
    launches = PREFILL_LAUNCHES if sweep else PREFILL_LAUNCHES[:2]
    for tokens, context in ((1600, 1600), (512, 4096)):
        layers = [Paged.of([context]) for _ in range(28)]
        q = random(tokens, HEADS, DIM)
        variants: dict[str, list[Call]] = {}
        for launch in launches:
            tiles = Tiles.of([tokens], launch.rows, DEVICE, seq_lens=[context])
            variants[_name(launch)] = [partial(layer.prefill, q, tiles, launch) for layer in layers]
        if tokens == context:
            k, v = random(2, 1, KV_HEADS, tokens, DIM)
            queries = q.transpose(0, 1)[None]
            dense = partial(F.scaled_dot_product_attention, queries, k, v, is_causal=True, enable_gqa=True)
            variants["torch, dense keys"] = [dense] * 8
        seen = tokens * (context - tokens) + tokens * (tokens + 1) / 2
        yield from measure(f"prefill {tokens} of {context}", variants, 4 * DIM * HEADS * seen / FLOPS * 1e6)


def time_vit(sweep: bool) -> Timed:
    launches = VIT_LAUNCHES if sweep else VIT_LAUNCHES[:2]
    for lengths in ([6256], [1564] * 8, [1564]):
        inputs = [random(sum(lengths), 3, VIT_HEADS, VIT_DIM) for _ in range(4)]
        variants: dict[str, list[Call]] = {}
        for launch in launches:
            tiles = Tiles.of(lengths, launch.rows, DEVICE)
            variants[_name(launch)] = [partial(_vit, x, tiles, launch) for x in inputs]
        variants |= _torch_vit_calls(inputs, lengths)
        floor = 4 * VIT_DIM * VIT_HEADS * sum(n * n for n in lengths) / FLOPS * 1e6
        yield from measure(f"pictures {len(lengths)} x {lengths[0]}", variants, floor)


def _torch_vit_calls(inputs: list[Tensor], lengths: list[int]) -> dict[str, list[Call]]:
    """Equal pictures are one batch for SDPA. "Copied" has each head together in memory; the copy is not timed."""
    strided = [x.view(len(lengths), -1, 3, VIT_HEADS, VIT_DIM).permute(2, 0, 3, 1, 4) for x in inputs]
    copied = [x.contiguous() for x in strided]  # [3, pictures, heads, length, d]
    starts = torch.arange(0, sum(lengths) + 1, lengths[0], dtype=torch.int32, device=DEVICE)
    packed = [x.transpose(0, 1).contiguous() for x in inputs]  # [3, T, heads, d]
    return {
        "torch flash, strided": [partial(_sdpa, x, SDPBackend.FLASH_ATTENTION) for x in strided],
        "torch flash, copied": [partial(_sdpa, x, SDPBackend.FLASH_ATTENTION) for x in copied],
        "torch cudnn, strided": [partial(_sdpa, x, SDPBackend.CUDNN_ATTENTION) for x in strided],
        "torch cudnn, copied": [partial(_sdpa, x, SDPBackend.CUDNN_ATTENTION) for x in copied],
        "torch varlen": [partial(_varlen, x, starts, lengths[0]) for x in packed],
    }


def _vit(x: Tensor, tiles: Tiles, launch: Launch) -> Tensor:
    q, k, v = x.unbind(1)
    return packed_vit(q, k, v, tiles, VIT_DIM**-0.5, launch=launch)


def _varlen(qkv: Tensor, starts: Tensor, longest: int) -> object:
    q, k, v = qkv
    return varlen_attn(q, k, v, starts, starts, longest, longest)


def _sdpa(qkv: Tensor, backend: SDPBackend) -> Tensor:
    q, k, v = qkv
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)


def time_small(sweep: bool) -> Timed:
    for tokens in (1, 32, 128, 1600):
        for name, (call, elements) in _small_works(tokens).items():
            floor = elements * DTYPE.itemsize / BYTES_PER_S * 1e6
            yield from measure(f"{name} {tokens}", {"in a graph": [call] * 50}, floor)
            if sweep and tokens == 1:
                yield Row(f"{name} {tokens}", "host, launched one by one", host_us(call), floor)


def _small_works(tokens: int) -> dict[str, tuple[Call, int]]:
    """Each call, and the elements it reads or writes."""
    x, residual, weight = random(tokens, HIDDEN), random(tokens, HIDDEN), random(HIDDEN)
    arguments = stored(tokens)
    return {
        "add_rms_norm": (partial(add_rms_norm, x, residual, weight, 1e-6), 4 * x.numel()),
        "silu_and_mul": (partial(silu_and_mul, random(tokens, 2 * WIDE)), 3 * tokens * WIDE),
        "rotary_and_store": (partial(rotary_and_store, *arguments), tokens * DIM * (2 * HEADS + 4 * KV_HEADS + 2)),
    }


def host_us(call: Call) -> float:
    """What a launch costs the host."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(300):
        call()
    return (time.perf_counter() - start) / 300 * 1e6


def _name(launch: Launch) -> str:
    limit = f" regs {launch.registers}" if launch.registers else ""
    return f"{launch.rows}x{launch.keys} warps {launch.warps} stages {launch.stages}{limit}"


CHECKS = (check_decode, check_prefill, check_vit, check_small)
TIMINGS = (time_decode, time_prefill, time_vit, time_small)

if __name__ == "__main__":
    main()
