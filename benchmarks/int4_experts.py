"""Experts in INT4 on a GPU: `python -m benchmarks.int4_gpu experts`. Are they right, and which launches are fastest?

Shapes are those of Qwen3-VL-30B-A3B and of Qwen3.5-35B-A3B's routed experts. Times are of a CUDA graph over different
experts in a row, so that weights come from memory. Floors: bytes of the touched experts at 4.2 TB/s, or FLOP at 700
TFLOP/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import attempt, graph_us
from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.launch.compile_ahead import compiling
from saccade.kernels.moe.experts import TileConfig
from saccade.kernels.moe.experts_gemv import VectorConfig
from saccade.kernels.moe.experts_gemv_int4 import int4_vector_down, int4_vector_gate_up
from saccade.kernels.moe.experts_int4 import int4_moe_down, int4_moe_gate_up
from saccade.kernels.moe.fused_moe import MoELaunch, MoEWeights, run_experts
from saccade.kernels.moe.sorting import sort_by_expert
from saccade.kernels.moe.topk_routing import Routed
from saccade.kernels.ops.unpack_int4 import unpack_int4

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = (1, 8, 32, 1600)
SLOTS, BATCHES, SAMPLE = 8, 8, 48
BANDWIDTH, FLOPS = 4.2e6, 700e6  # per microsecond
MAX_ERROR = 1e-2  # relative, of bfloat16
Config = TileConfig | VectorConfig
Call = Callable[[], Tensor]


class Shape(NamedTuple):
    name: str
    hidden: int
    width: int
    experts: int
    group: int = 128
    has_zeros: bool = True


SHAPES = (Shape("Qwen3-VL-30B-A3B", 2048, 768, 128), Shape("Qwen3.5-35B-A3B", 2048, 512, 256))
SMALL = [  # no whole tiles, chunks that no step divides
    Shape(f"{group} {has_zeros}", 1408, 384, 16, group, has_zeros)
    for group, has_zeros in ((128, False), (128, True), (64, True), (32, True))
]
VECTORS = [  # outputs, inputs, warps
    *((outputs, inputs, warps) for outputs in (2, 4, 8) for inputs, warps in ((1024, 1), (2048, 2), (2048, 1))),
    (1, 1024, 1), (1, 2048, 1), (4, 512, 1), (8, 512, 1), (4, 2048, 4), (16, 1024, 1), (16, 2048, 2),
]  # fmt: skip
TILES = [  # rows of a block, outputs, inputs, warps, stages
    (16, 32, 256, 2, 3), (16, 32, 256, 2, 2), (16, 32, 128, 2, 4), (16, 32, 128, 2, 6), (16, 64, 256, 4, 3),
    (16, 64, 256, 4, 2), (16, 64, 128, 4, 4), (16, 64, 128, 4, 6), (16, 16, 256, 1, 3), (16, 128, 128, 4, 4),
    (16, 128, 256, 8, 2),
]  # fmt: skip
WIDE = [
    (32, 64, 128, 4, 4), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4), (64, 64, 256, 4, 2), (64, 128, 128, 8, 3),
    (64, 128, 128, 8, 4), (64, 128, 128, 4, 3), (128, 64, 128, 4, 3), (128, 64, 128, 8, 3), (128, 128, 128, 8, 3),
]  # fmt: skip


class Bench:
    """Random experts in INT4 and dequantised, and tokens that go to them."""

    def __init__(self, shape: Shape, rows: tuple[int, ...]) -> None:
        self.shape = shape
        self.gate_up = _weight(shape, 2 * shape.width, shape.hidden)
        self.down = _weight(shape, shape.hidden, shape.width)
        none = torch.empty(0, device=CUDA)
        plain = [_dequantized(own) for own in (self.gate_up, self.down)]
        self.plain = MoEWeights(none, None, *plain)
        weights, scales, zeros = zip(self.gate_up, self.down, strict=True)
        self.packed = MoEWeights(none, None, *weights, *scales, *zeros)
        self.routed = {count: _routed(shape, count) for count in rows}
        self.x = torch.randn(max(rows), shape.hidden, device=CUDA, dtype=BF16)
        self.wide = torch.randn(max(rows) * SLOTS, shape.width, device=CUDA, dtype=BF16)

    def layer(self, rows: int, weights: MoEWeights, launch: MoELaunch | None = None) -> list[Call]:
        x = self.x[:rows]
        return [partial(run_experts, x, weights, routed, launch=launch) for routed in self.routed[rows]]

    def part(self, name: str, rows: int, block: int, config: Config) -> list[Call]:
        return [self._call(name, rows, block, config, routed) for routed in self.routed[rows]]

    def run_part(self, name: str, rows: int, block: int, config: Config) -> Tensor:
        """With its sorting, to compile both."""
        return self._call(name, rows, block, config, self.routed[rows][0])()

    def _call(self, name: str, rows: int, block: int, config: Config, routed: Routed) -> Call:
        x, wide = self.x[:rows], self.wide[: rows * SLOTS]
        if isinstance(config, VectorConfig):
            if name == "gate_up":
                return partial(int4_vector_gate_up, x, self.gate_up, routed, config)
            return partial(int4_vector_down, wide, self.down, routed, config)
        pairs = sort_by_expert(routed.experts, self.shape.experts, block)
        if name == "gate_up":
            return partial(int4_moe_gate_up, x, self.gate_up, pairs, config)
        return partial(int4_moe_down, wide, self.down, pairs, routed.weights, config)

    def floor(self, rows: int, part: str) -> float:
        """Microseconds of a layer, or of one of its GEMMs; of INT4 numbers, or of bfloat16."""
        touched = sum(len(routed.experts.unique()) for routed in self.routed[rows]) / BATCHES
        own = {"gate_up": self.gate_up, "down": self.down}
        chosen = [own[part]] if part in own else list(own.values())
        size = sum(one.nbytes for weight in chosen for one in weight if one is not None)
        numbers = sum(4 * weight.weight.numel() for weight in chosen)
        per_expert = (2 * numbers if part == "bfloat16" else size) / self.shape.experts
        compute = 2 * rows * SLOTS * numbers / self.shape.experts / FLOPS
        return max(touched * per_expert / BANDWIDTH, compute)

    def error(self, rows: int, launch: MoELaunch | None = None) -> float:
        routed = self.routed[rows][0]
        found = run_experts(self.x[:rows], self.packed, routed, launch=launch)[:SAMPLE].float()
        expected = self._exact(routed, min(rows, SAMPLE))
        return float((found - expected).norm() / expected.norm())

    def _exact(self, routed: Routed, tokens: int) -> Tensor:
        rows, experts = self.x[:tokens].float(), routed.experts[:tokens]
        out = torch.zeros_like(rows)
        for expert in experts.unique().tolist():
            token, slot = (experts == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows[token], self.plain.gate_up[expert].float()).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, self.plain.down[expert].float())
            out.index_add_(0, token, made * routed.weights[token, slot, None])
        return out


def _weight(shape: Shape, rows: int, columns: int) -> Int4Weight:
    packed = torch.randint(-(2**15), 2**15, (shape.experts, rows, columns // 4), device=CUDA, dtype=torch.int16)
    groups = (shape.experts, rows, columns // shape.group)
    scales = ((torch.rand(groups, device=CUDA) + 0.5) * 0.2 * columns**-0.5).half()
    zeros = torch.randint(6, 11, groups, device=CUDA, dtype=torch.uint8) if shape.has_zeros else None
    return Int4Weight(packed, scales, zeros)


def _dequantized(own: Int4Weight) -> Tensor:
    experts, rows, _ = own.weight.shape
    out = torch.empty(experts * rows, own.inputs, device=CUDA, dtype=BF16)
    zeros = None if own.zeros is None else own.zeros.flatten(0, 1)
    unpack_int4(own.weight.flatten(0, 1), own.scales.flatten(0, 1), zeros, out)
    return out.view(experts, rows, -1)


def _routed(shape: Shape, rows: int) -> list[Routed]:
    """Of single tokens, no two go to the same expert."""
    shares = torch.rand(rows, SLOTS, device=CUDA)
    if rows == 1:
        order = torch.randperm(shape.experts, device=CUDA).int()
        return [Routed(shares, order[SLOTS * i : SLOTS * (i + 1)].view(1, -1).clone()) for i in range(BATCHES)]
    chosen = [torch.rand(rows, shape.experts, device=CUDA).argsort(1)[:, :SLOTS] for _ in range(BATCHES)]
    return [Routed(shares, experts.int().contiguous()) for experts in chosen]


def each_us(calls: list[Call]) -> float:
    return graph_us(lambda: [call() for call in calls]) / len(calls)


def candidates(rows: int) -> list[tuple[int, Config]]:
    """Rows of a block, and a launch, for either GEMM."""
    if rows == 1:
        return [(0, VectorConfig(*sizes, prefetch=True)) for sizes in VECTORS]
    tiles = {32: TILES, 1600: WIDE}.get(rows, [])
    group = 8 if rows == 1600 else 1
    return [(block, TileConfig(*sizes[:2], *sizes[2:], group=group)) for block, *sizes in tiles]


def short(block: int, config: Config) -> str:
    stages = f"s{config.stages}" if isinstance(config, TileConfig) else ""
    return f"{block}:{config.outputs}x{config.inputs}w{config.warps}{stages}"


Found = dict[tuple[int, Config], float]


def sweep(bench: Bench, rows: int, name: str) -> Found:
    found: Found = {}
    for block, config in candidates(rows):
        calls = bench.part(name, rows, block, config)
        us = attempt(f"{name} {short(block, config)}", partial(each_us, calls))
        if us is not None:
            found[block, config] = us
    ranked = sorted(found, key=lambda one: found[one])
    shown = " | ".join(f"{short(*one)} {found[one]:.1f}" for one in ranked)
    print(f"  {name:8} floor {bench.floor(rows, name):.1f}: {shown}", flush=True)
    return found


def best_launch(gate_up: Found, down: Found) -> MoELaunch | None:
    """The fastest with blocks of the same size for both."""
    both = [(a, b) for a in gate_up for b in down if a[0] == b[0]]
    if not both:
        return None
    first, second = min(both, key=lambda one: gate_up[one[0]] + down[one[1]])
    return MoELaunch(first[0], first[1], second[1])


def report(bench: Bench, rows: int, name: str, launch: MoELaunch | None) -> None:
    error = attempt("error", partial(bench.error, rows, launch))
    us = attempt(name, lambda: each_us(bench.layer(rows, bench.packed, launch)))
    if error is None or us is None:
        return
    how = f"; {short(launch.rows, launch.gate_up)} {short(launch.rows, launch.down)}" if launch else ""
    verdict = "right" if error < MAX_ERROR else "WRONG"
    print(f"  INT4 {name:7} {us:7.1f} us, floor {bench.floor(rows, ''):6.1f}, {verdict} ({error:.1e}){how}", flush=True)


def measure(bench: Bench, rows: int) -> None:
    print(f"{bench.shape.name}, {rows} rows")
    us = attempt("bfloat16", lambda: each_us(bench.layer(rows, bench.plain)))
    print(f"  bfloat16     {us or 0:7.1f} us, floor {bench.floor(rows, 'bfloat16'):6.1f}")
    report(bench, rows, "chosen", None)
    if candidates(rows):
        launch = best_launch(sweep(bench, rows, "gate_up"), sweep(bench, rows, "down"))
        report(bench, rows, "best", launch)


def jobs(benches: list[Bench], small: list[Bench]) -> Iterator[Call]:
    for bench in (*benches, *small):
        for rows in bench.routed:
            yield bench.layer(rows, bench.packed)[0]
            yield bench.layer(rows, bench.plain)[0]
    for bench in benches:
        for rows in ROWS:
            for block, config in candidates(rows):
                yield from (partial(bench.run_part, name, rows, block, config) for name in ("gate_up", "down"))


def main() -> None:
    torch.manual_seed(0)
    start = time.perf_counter()
    small = [Bench(shape, (1, 3, 40, 300)) for shape in SMALL]
    benches = [Bench(shape, ROWS) for shape in SHAPES]
    calls = list(jobs(benches, small))
    with compiling(16):
        for call in calls:
            attempt("compile", call)
    print(f"{len(calls)} launches compiled in {time.perf_counter() - start:.1f} s", flush=True)
    for bench in small:
        for rows in bench.routed:
            error = attempt(f"{bench.shape.name} {rows}", partial(bench.error, rows))
            verdict = "right" if error is not None and error < MAX_ERROR else "WRONG"
            print(f"{bench.shape.name:10} {rows:4} rows: {verdict}, error {error}")
    for rows in ROWS:
        for bench in benches:
            attempt(f"{bench.shape.name} {rows}", partial(measure, bench, rows))
    print(f"{time.perf_counter() - start:.0f} s in all")
