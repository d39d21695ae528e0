"""MLA kernels on a GPU at DeepSeek-VL2's shapes: are they right, and how far from the floor?

    python -m benchmarks.mla_gpu

Each time is that of one layer among others in a CUDA graph; layers have caches of their own, so that L2 does not help.
Floors: 4.2 TB/s of memory, 700 TFLOP/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_timing import attempt, graph_us
from saccade.kernels.attention.mla_absorbed import (
    choose_splits,
    decode_launch,
    mla_decode,
    mla_prefill,
    prefill_launch,
    tile_tokens,
)
from saccade.kernels.attention.mla_expanded import (
    GATHERED,
    ExpandedContext,
    MLADims,
    expand_context,
    launch_for,
    mla_expanded_prefill,
    tile_rows,
)
from saccade.kernels.attention.mla_store import mla_rope_store
from saccade.kernels.launch.varlen_tiles import Launch, Tiles
from saccade.models.layers.mla import rotate_pairs
from saccade.models.layers.rotary_embedding import cos_sin
from saccade.models.layers.torch_attention import AttentionBatch, reference_attention

DEVICE = torch.device("cuda")
DIMS = MLADims(rank=512, nope=128, rope=64, value=128)
DIM = DIMS.rank + DIMS.rope
BLOCK, SCALE = 16, 192**-0.5
BYTES, FLOPS = 4.2e12, 700e12
COLD = 160 << 20  # bytes of all layers' caches

DECODE = {
    16: [Launch(16, 64, warps, 2, one_loop=True) for warps in (4, 8)],
    32: [Launch(32, 64, 8, 2, one_loop=True), Launch(32, 64, 4, 2, one_loop=True), Launch(16, 64, 4, 2, one_loop=True)],
}
ABSORBED = {
    16: [
        Launch(64, 64, 8, 2, one_loop=True),
        Launch(64, 64, 8, 2),
        Launch(32, 64, 8, 2, one_loop=True),
        Launch(16, 64, 4, 2, one_loop=True),
    ],
    32: [Launch(64, 64, 8, 2, one_loop=True)],
}
EXPANDED = {
    16: [
        Launch(128, 64, 8, 3),
        Launch(128, 64, 8, 2),
        Launch(128, 128, 8, 2),
        Launch(128, 64, 8, 4),
        Launch(64, 64, 4, 3),
        Launch(64, 64, 4, 2),
    ],
    32: [Launch(128, 64, 8, 3), Launch(64, 64, 4, 3)],
}
ODD = 10  # a number of heads that is no power of two: only checked, with the first launches


def launches(table: dict[int, list[Launch]], heads: int) -> list[Launch]:
    return table[16][:1] if heads == ODD else table[heads]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Cached(NamedTuple):
    """Caches of several layers, and contexts with blocks anywhere in them."""

    layers: Tensor  # [layers, slots, 1, DIM]
    tables: Tensor
    seq_lens: list[int]

    @classmethod
    def of(cls, seq_lens: list[int], layers: int | None = None) -> Cached:
        blocks = -(-max(seq_lens) // BLOCK)
        count = blocks * len(seq_lens)
        layers = layers or min(max(2, COLD // (count * BLOCK * DIM * 2)), 48)
        tables = torch.randperm(count, device=DEVICE).int().view(len(seq_lens), blocks)
        return cls(random(layers, count * BLOCK, 1, DIM), tables, seq_lens)

    def reference(self, queries: Tensor, lengths: list[int]) -> Tensor:
        batch = AttentionBatch(lengths, self.seq_lens, self.tables.long(), ints([]), BLOCK)
        cache = self.layers[0].float()
        return reference_attention(queries.float(), cache, cache, batch, SCALE)[..., : DIMS.rank]


def check(name: str, found: Tensor, expected: Tensor, limit: float = 1e-2) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    print(f"{'PASS' if error < limit else 'FAIL'} {name}: relative error {error:.1e}", flush=True)


def check_all() -> None:
    for heads in (16, ODD, 32):
        attempt("store", partial(check_store, heads))
        attempt("decode", partial(check_decode, heads))
        attempt("absorbed", partial(check_absorbed, heads))
        attempt("expanded", partial(check_expanded, heads))


def check_store(heads: int) -> None:
    projected = random(70, heads * 192 + DIM)
    q, kv = projected[:, : heads * 192].view(70, heads, 192), projected[:, heads * 192 :]
    cos, sin = cos_sin(torch.rand(70, 1, 32, device=DEVICE) * 50, torch.bfloat16)
    weight, cache, queries = random(512), random(640, 1, DIM), random(70, heads, DIM)
    slots = torch.randperm(640, device=DEVICE)[:70].int()
    slots[3] = -1
    before, kept = cache.clone(), slots >= 0
    mla_rope_store(q[..., 128:], kv, cos, sin, weight, 1e-6, cache, slots, queries[..., 512:])
    wanted = rotate_pairs(q[..., 128:].float().contiguous(), cos.float(), sin.float())
    check(f"store, queries, {heads} heads", queries[..., 512:], wanted)
    norm = torch.nn.functional.rms_norm(kv[:, :512].float(), (512,), weight.float(), 1e-6)
    vectors = torch.cat((norm, rotate_pairs(kv[:, None, 512:].float(), cos.float(), sin.float())[:, 0]), dim=-1)
    before[slots[kept].long(), 0] = vectors[kept].to(before.dtype)
    check(f"store, cache, {heads} heads", cache, before)
    mla_rope_store(q[..., 128:], kv, cos, sin, weight, 1e-6, cache, slots, q[..., 128:])
    check(f"store in place, {heads} heads", q[..., 128:], wanted)


def check_decode(heads: int) -> None:
    cached = Cached.of([1, 17, 64, 65, 1000, 2077], layers=1)
    queries = random(6, heads, DIM)
    expected = cached.reference(queries, [1] * 6)
    for launch in launches(DECODE, heads):
        for splits in (1, 7, None):
            found = mla_decode(
                queries, cached.layers[0], cached.tables, ints(cached.seq_lens), 512, BLOCK, SCALE,
                splits=splits, launch=launch,
            )  # fmt: skip
            check(f"decode {heads} heads {short(launch)} splits {splits}", found, expected)


WINDOWS = ([37, 1, 300], [37, 900, 1500])


def check_absorbed(heads: int) -> None:
    lengths, seq_lens = WINDOWS
    cached = Cached.of(seq_lens, layers=1)
    queries = random(sum(lengths), heads, DIM)
    expected = cached.reference(queries, lengths)
    for launch in launches(ABSORBED, heads):
        tiles = Tiles.of(lengths, tile_tokens(heads, launch), DEVICE, seq_lens=seq_lens)
        for splits in (1, 3):
            found = mla_prefill(
                queries, cached.layers[0], cached.tables, ints(seq_lens), tiles, 512, BLOCK, SCALE,
                splits=splits, launch=launch,
            )  # fmt: skip
            check(f"absorbed prefill {heads} heads {short(launch)} splits {splits}", found, expected)


def check_expanded(heads: int) -> None:
    lengths, seq_lens = WINDOWS
    cached, weight = Cached.of(seq_lens, layers=1), random(heads * 256, 512) / 16
    q = random(sum(lengths), heads, 192)
    by_head = weight.view(heads, 256, 512).float()
    absorbed = torch.einsum("thd,hdr->thr", q[..., :128].float(), by_head[:, :128])
    mixed = cached.reference(torch.cat((absorbed, q[..., 128:].float()), dim=-1), lengths)
    expected = torch.einsum("thr,hdr->thd", mixed, by_head[:, 128:])
    context = expand(cached, cached.layers[0], weight)
    for launch in launches(EXPANDED, heads):
        tiles = Tiles.of(lengths, launch.rows, DEVICE, seq_lens=seq_lens)
        found = mla_expanded_prefill(q, context, tiles, DIMS, SCALE, launch=launch)
        check(f"expanded prefill {heads} heads {short(launch)}", found, expected)


def expand(cached: Cached, cache: Tensor, weight: Tensor, contexts: Tiles | None = None) -> ExpandedContext:
    contexts = contexts or Tiles.of(cached.seq_lens, GATHERED, DEVICE)
    return expand_context(cache, cached.tables, contexts, sum(cached.seq_lens), weight, DIMS, BLOCK)


def short(launch: Launch) -> str:
    loops = "" if launch.one_loop else " two loops"
    return f"{launch.rows}x{launch.keys} w{launch.warps} s{launch.stages}{loops}"


def compile_jobs() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each variant once, so that threads compile several at a time."""
    cached = Cached.of([100], layers=1)
    cache, tables, seq_lens = cached.layers[0], cached.tables, ints([100])
    for heads in (16, ODD, 32):
        queries, q = random(100, heads, DIM), random(100, heads, 192)
        for launch in launches(DECODE, heads):
            for splits in (1, 2):
                work = partial(mla_decode, queries[:1], cache, tables, seq_lens, 512, BLOCK, SCALE)
                yield f"decode {heads} {short(launch)}", partial(work, splits=splits, launch=launch)
        for launch in launches(ABSORBED, heads):
            tiles = Tiles.of([100], tile_tokens(heads, launch), DEVICE, seq_lens=[100])
            for splits in (1, 3):
                work = partial(mla_prefill, queries, cache, tables, seq_lens, tiles, 512, BLOCK, SCALE)
                yield f"absorbed {heads} {short(launch)}", partial(work, splits=splits, launch=launch)
        context = expand(cached, cache, random(heads * 256, 512))
        for launch in launches(EXPANDED, heads):
            tiles = Tiles.of([100], launch.rows, DEVICE, seq_lens=[100])
            yield (
                f"expanded {heads} {short(launch)}",
                partial(mla_expanded_prefill, q, context, tiles, DIMS, SCALE, launch=launch),
            )


def compile_all() -> None:
    start = time.perf_counter()
    jobs = list(compile_jobs())
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: attempt(*job), jobs))
    torch.cuda.synchronize()
    print(f"{len(jobs)} variants compiled in {time.perf_counter() - start:.1f} s", flush=True)


def time_decode(heads: int, requests: int, context: int) -> None:
    cached = Cached.of([context] * requests)
    queries, seq_lens = random(requests, heads, DIM), ints(cached.seq_lens)
    floor = requests * context * DIM * 2 / BYTES * 1e6
    chosen = decode_launch(cached.layers, heads)
    usual = choose_splits(requests * -(-heads // chosen.rows), cached.tables.shape[1] * BLOCK, 132)
    print(f"decode {heads} heads, {requests} x {context}: floor {floor:.1f} us |", end="", flush=True)
    for launch in launches(DECODE, heads):
        for splits in sorted({usual, max(usual // 2, 1), usual * 2}):
            work = partial(
                mla_decode, queries, block_tables=cached.tables, seq_lens=seq_lens, rank=512, block_size=BLOCK,
                scale=SCALE, splits=splits, launch=launch,
            )  # fmt: skip
            us = attempt(short(launch), partial(layers_us, cached, over(work)))
            if us is not None:
                mark = "*" if launch == chosen and splits == usual else ""
                print(f" {mark}{short(launch)} /{splits} {us:.1f} = {us / floor:.2f}x |", end="", flush=True)
    print(flush=True)


def over(work: Callable[..., object]) -> Callable[[Tensor], object]:
    return lambda cache: work(cache=cache)


def layers_us(cached: Cached, work: Callable[[Tensor], object]) -> float:
    return graph_us(lambda: [work(cache) for cache in cached.layers]) / len(cached.layers)


def time_unequal() -> None:
    """64 requests, a quarter of them ten times as long."""
    cached = Cached.of([4000 if i % 4 == 1 else 400 for i in range(64)], layers=4)
    queries, seq_lens = random(64, 16, DIM), ints(cached.seq_lens)
    floor = sum(cached.seq_lens) * DIM * 2 / BYTES * 1e6
    print(f"decode 16 heads, 64 unequal: floor {floor:.1f} us |", end="", flush=True)
    for splits in (1, 2, 4, 8, 16):
        work = partial(
            mla_decode, queries, block_tables=cached.tables, seq_lens=seq_lens, rank=512, block_size=BLOCK,
            scale=SCALE, splits=splits,
        )  # fmt: skip
        us = layers_us(cached, over(work))
        print(f" /{splits} {us:.1f} = {us / floor:.2f}x |", end="", flush=True)
    print(flush=True)


def time_prefill(heads: int, tokens: int, past: int = 0) -> None:
    seq_len = tokens + past
    cached = Cached.of([seq_len], layers=2)
    pairs = heads * tokens * (past + tokens / 2)
    name = f"prefill {heads} heads, {tokens} tokens over {past}"
    absorbed_flop, expanded_flop = pairs * 2 * (DIM + 512), pairs * 2 * (192 + 128)
    queries, seq_lens = random(tokens, heads, DIM), ints([seq_len])
    print(f"{name}, absorbed: floor {absorbed_flop / FLOPS * 1e6:.0f} us |", end="", flush=True)
    for launch in launches(ABSORBED, heads):
        tiles = Tiles.of([tokens], tile_tokens(heads, launch), DEVICE, seq_lens=[seq_len])
        work = partial(
            mla_prefill, queries, block_tables=cached.tables, seq_lens=seq_lens, tiles=tiles, rank=512,
            block_size=BLOCK, scale=SCALE, launch=launch,
        )  # fmt: skip
        report(launch == prefill_launch(cached.layers), launch, cached, absorbed_flop, over(work))
    print(f"\n{name}, expanded: floor {expanded_flop / FLOPS * 1e6:.0f} us |", end="", flush=True)
    weight, q = random(heads * 256, 512), random(tokens, heads, 192)
    contexts = Tiles.of([seq_len], GATHERED, DEVICE)
    context = expand(cached, cached.layers[0], weight)
    chosen = launch_for(q, tile_rows(q, *q.shape[:2]))
    for launch in launches(EXPANDED, heads):
        tiles = Tiles.of([tokens], launch.rows, DEVICE, seq_lens=[seq_len])
        attend = partial(mla_expanded_prefill, q, context, tiles, DIMS, SCALE, launch=launch)
        report(launch == chosen, launch, cached, expanded_flop, lambda cache: attend())  # noqa: B023
    us = layers_us(cached, lambda cache: expand(cached, cache, weight, contexts))
    print(f" gather and expand {us:.1f} us", flush=True)


def report(is_chosen: bool, launch: Launch, cached: Cached, flop: float, work: Callable[[Tensor], object]) -> None:
    us = attempt(short(launch), partial(layers_us, cached, work))
    if us is not None:
        mark = "*" if is_chosen else ""
        print(f" {mark}{short(launch)} {us:.0f} us = {flop / us / 1e6:.0f} TFLOP/s |", end="", flush=True)


def time_projections(heads: int, tokens: int) -> None:
    """Both batched GEMMs and the store, in the layouts that a layer has."""
    layers = 24
    weights = random(layers, heads, 256, 512)
    projected = random(tokens, heads * 192 + DIM)
    q, kv = projected[:, : heads * 192].view(tokens, heads, 192), projected[:, heads * 192 :]
    queries, mixed, values = random(tokens, heads, DIM), random(tokens, heads, 512), random(tokens, heads, 128)
    cos, sin = cos_sin(torch.rand(tokens, 1, 32, device=DEVICE) * 50, torch.bfloat16)
    cache, norm, slots = random(tokens + 16, 1, DIM), random(512), ints(range(tokens))

    def absorb(weight: Tensor) -> None:
        torch.bmm(q[..., :128].transpose(0, 1), weight[:, :128], out=queries[..., :512].transpose(0, 1))

    def up(weight: Tensor) -> None:
        torch.bmm(mixed.transpose(0, 1), weight[:, 128:].mT, out=values.transpose(0, 1))

    def store(weight: Tensor) -> None:
        mla_rope_store(q[..., 128:], kv, cos, sin, norm, 1e-6, cache, slots, queries[..., 512:])

    flop = 2 * tokens * heads * 128 * 512
    floor = max(flop / FLOPS, (heads * 128 * 512 + tokens * heads * 640) * 2 / BYTES) * 1e6
    for name, work in (("absorb", absorb), ("values up", up), ("store", store)):
        us = attempt(name, lambda: graph_us(lambda: [work(weight) for weight in weights]) / layers)  # noqa: B023
        if us is not None:
            print(f"{name} {heads} heads, {tokens} tokens: {us:.1f} us, floor of a bmm {floor:.1f}", flush=True)


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        compile_all()
        check_all()
        print(f"-- {time.perf_counter() - start:.1f} s", flush=True)
        for heads in (16, 32):
            for requests in (1, 32, 128):
                for context in (1024, 8192):
                    attempt("decode", partial(time_decode, heads, requests, context))
        attempt("unequal", time_unequal)
        for heads, tokens, past in ((16, 1600, 0), (16, 8192, 0), (32, 1600, 0), (16, 64, 4000), (16, 512, 4000)):
            attempt("prefill", partial(time_prefill, heads, tokens, past))
        for heads in (16, 32):
            for tokens in (1, 32, 128, 1600):
                attempt("projections", partial(time_projections, heads, tokens))
    print(f"-- {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
