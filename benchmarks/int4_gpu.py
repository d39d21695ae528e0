"""INT4 weights on a GPU: are the kernels right, and which launches are fastest for Qwen3-VL-8B's GEMMs?

    python -m benchmarks.int4_gpu            all launches that are tried, then the best of each GEMM
    python -m benchmarks.int4_gpu --quick    only those that are chosen
    python -m benchmarks.int4_gpu experts    those of experts (`int4_experts`)

Times are of six weights in turn inside a CUDA graph, so that none is in the L2 cache. Every result is compared with the
dequantised weight's. TB/s count packed numbers, scales and zero points.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import int4_experts
from benchmarks.gpu_timing import attempt, graph_us
from saccade.kernels.gemm import hopper_int4_split_k as split_k
from saccade.kernels.gemm.int4_linear import Int4Weight, Norm, choose_int4, int4_linear
from saccade.kernels.gemm.skinny import Config, SplitWorkspace
from saccade.kernels.launch.compile_ahead import compiling
from saccade.kernels.ops.unpack_int4 import unpack_int4
from saccade.models.int4_weights import GroupScales, dequantized

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
LAYERS, COPIES, EPS = 36, 6, 1e-6
ROWS = (1, 8, 32)
MAX_PROGRAMS = 1600  # of splits
MAX_ERROR = 1e-2  # relative, of bfloat16


class Gemm(NamedTuple):
    name: str
    outputs: int  # of the gate and as many of `up` where there is one
    inputs: int
    gated: bool = False
    normed: bool = False  # in the same launch, for one row
    group: int = 128
    has_zeros: bool = True

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.gated else 1)


GEMMS = (
    Gemm("qkv", 6144, 4096, normed=True),
    Gemm("out", 4096, 4096),
    Gemm("gate_up", 12288, 4096, gated=True, normed=True),
    Gemm("down", 4096, 12288),
)
SMALL = [  # no whole tiles, chunks that no step divides
    Gemm(f"{group} {has_zeros} {gated}", 200, 1408, gated, normed, group, has_zeros)
    for group, has_zeros in ((128, False), (64, True), (32, True))
    for gated, normed in ((False, False), (True, True))
]
VECTORS = [  # outputs, inputs, warps
    *((outputs, 1024 * warps, warps) for outputs in (1, 2, 4, 8, 16) for warps in (1, 2, 4)),
    *((outputs, 512 * warps, warps) for outputs in (4, 8) for warps in (1, 2, 4, 8)),
    *((outputs, 2048 * warps, warps) for outputs in (1, 2, 4) for warps in (1, 2)),
    (4, 8192, 8), (8, 8192, 8), (2, 8192, 8), (4, 4096, 8), (8, 4096, 8),
]  # fmt: skip
TILES = {  # by rows: outputs, inputs, warps, stages
    1: [(32, 256, 2, 3)],
    8: [(64, 256, 4, 3), (32, 256, 2, 2), (32, 256, 2, 3), (32, 256, 2, 5), (32, 128, 2, 4), (16, 256, 1, 3),
        (128, 128, 4, 4)],
    32: [(64, 256, 4, 2), (64, 256, 4, 3), (64, 128, 4, 4), (32, 256, 2, 3), (32, 128, 2, 4)],
}  # fmt: skip


def candidates(gemm: Gemm, rows: int) -> list[Config]:
    few = max(16, rows)
    found = []
    for outputs, inputs, warps, stages in TILES[rows]:
        steps, tiles = gemm.inputs // inputs, -(-gemm.outputs // outputs)
        splits = {1, 2, 4, 8} if not gemm.gated else {1}
        fitting = [count for count in sorted(splits) if count <= steps and count * tiles <= MAX_PROGRAMS]
        found += [Config(few, outputs, inputs, count, warps, stages) for count in fitting]
    if rows == 1:
        found += [Config(1, outputs, inputs, 1, warps) for outputs, inputs, warps in VECTORS]
    return found


class Bench:
    """Random weights, and what is multiplied with them."""

    def __init__(self, gemm: Gemm, copies: int) -> None:
        self.gemm = gemm
        self.weights = [_weight(gemm) for _ in range(copies)]
        self.norm = Norm(torch.rand(gemm.inputs, device=CUDA, dtype=BF16) + 0.5, EPS)
        self.x = torch.randn(64, gemm.inputs, device=CUDA, dtype=BF16)
        self.residual = torch.randn(64, gemm.outputs, device=CUDA, dtype=BF16)
        self.workspace = SplitWorkspace(
            torch.empty(1 << 22, device=CUDA),
            torch.empty(MAX_PROGRAMS * 64, device=CUDA),
            torch.zeros(MAX_PROGRAMS, device=CUDA, dtype=torch.int32),
        )

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.weights[0] if part is not None)

    def run(self, rows: int, config: Config, weight: Int4Weight) -> Tensor:
        gemm = self.gemm
        norm = self.norm if gemm.normed and rows == 1 and config.rows == 1 else None
        residual = None if gemm.gated or gemm.normed else self.residual[:rows]
        how = {"norm": norm, "gated": gemm.gated, "workspace": self.workspace, "config": config}
        return int4_linear(self.x[:rows], weight, None, residual, **how)  # type: ignore[arg-type]

    def expected(self, rows: int, config: Config) -> Tensor:
        gemm, own = self.gemm, self.weights[0]
        x = self.x[:rows].float()
        if gemm.normed and rows == 1 and config.rows == 1:
            x = F.rms_norm(x, x.shape[1:], self.norm.weight.float(), EPS)
        found = F.linear(x, dequantized(own.weight, GroupScales(own.scales, own.zeros), torch.float32))
        if gemm.gated:
            gate, up = found.chunk(2, dim=-1)
            return F.silu(gate) * up
        return found if gemm.normed else found + self.residual[:rows].float()

    def error(self, rows: int, config: Config) -> float:
        expected = self.expected(rows, config)
        return float((self.run(rows, config, self.weights[0]).float() - expected).norm() / expected.norm())

    def checked_us(self, rows: int, config: Config) -> float:
        error = self.error(rows, config)
        if not error < MAX_ERROR:
            raise ValueError(f"relative error {error}")
        run = partial(self.run, rows, config)
        return graph_us(lambda: [run(weight) for weight in self.weights]) / len(self.weights)


def _weight(gemm: Gemm) -> Int4Weight:
    rows, columns = gemm.weight_rows, gemm.inputs
    packed = torch.randint(-(2**15), 2**15, (rows, columns // 4), device=CUDA, dtype=torch.int16)
    shape = (rows, columns // gemm.group)
    scales = ((torch.rand(shape, device=CUDA) + 0.5) * 0.2 * columns**-0.5).half()
    zeros = torch.randint(6, 11, shape, device=CUDA, dtype=torch.uint8) if gemm.has_zeros else None
    return Int4Weight(packed, scales, zeros)


def compile_all(jobs: list[tuple[Bench, int, Config]]) -> None:
    start = time.perf_counter()
    with compiling(16):
        for bench, rows, config in jobs:
            attempt("compile", partial(bench.run, rows, config, bench.weights[0]))
    print(f"{len(jobs)} launches compiled in {time.perf_counter() - start:.1f} s", flush=True)


def short(config: Config) -> str:
    sizes = "x".join(map(str, (config.rows, config.outputs, config.inputs)))
    return f"{sizes}/{config.splits}w{config.warps}s{config.stages}{'' if config.pdl else ' no pdl'}"


def check_small(benches: list[Bench]) -> None:
    for bench in benches:
        for rows in (1, 5, 40):
            config = choose_int4(rows, bench.gemm.outputs, bench.gemm.inputs, gated=bench.gemm.gated)
            assert config is not None
            error = attempt(f"{bench.gemm.name} {rows}", partial(bench.error, rows, config))
            print(f"{bench.gemm.name:16} {rows:3} rows: error {error} {'' if error and error < MAX_ERROR else 'WRONG'}")


def check_unpacking(bench: Bench) -> None:
    own, gemm = bench.weights[0], bench.gemm
    out = torch.empty(gemm.weight_rows, gemm.inputs, device=CUDA, dtype=BF16)
    expected = dequantized(own.weight, GroupScales(own.scales, own.zeros), BF16)
    is_right = torch.equal(unpack_int4(*own, out), expected)
    us = graph_us(lambda: [unpack_int4(*weight, out) for weight in bench.weights]) / len(bench.weights)
    rate = (bench.bytes + out.nbytes) / us / 1e6
    print(f"unpack {gemm.name:8} {'right' if is_right else 'WRONG'} {us:7.1f} us = {rate:.2f} TB/s", flush=True)


def check_split_k(bench: Bench) -> None:
    """The kernel of Hopper GPUs for few rows, as it is launched."""
    gemm, own = bench.gemm, bench.weights[0]
    for rows in (*ROWS, 64):
        x = bench.x[:rows]
        meant = dequantized(own.weight, GroupScales(own.scales, own.zeros), torch.float32)
        expected = F.linear(x.float(), meant)
        if gemm.gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = F.silu(gate) * up
            run = partial(split_k.int4_split_k_gated_linear, x, config=split_k.choose_gated(rows))
        else:
            config = split_k.choose_split_k(rows, gemm.outputs, gemm.inputs, own.group)
            run = partial(split_k.int4_split_k_linear, x, bias=None, config=config)
        found = run(packed=own).float()
        error = float(((found if gemm.gated else found.sum(0)) - expected).norm() / expected.norm())
        us = graph_us(lambda run=run: [run(packed=weight) for weight in bench.weights]) / len(bench.weights)  # type: ignore[misc]
        print(f"split-K {gemm.name:8} {rows:3} rows: {us:6.1f} us, error {error:.1e}", flush=True)


Times = dict[Config, float]


def measure(bench: Bench, rows: int, configs: list[Config]) -> Times:
    times = {config: attempt(short(config), partial(bench.checked_us, rows, config)) for config in configs}
    found = {config: us for config, us in times.items() if us is not None}
    print(f"{bench.gemm.name:8} {rows:3} rows | " + " | ".join(f"{short(c)} {us:.1f}" for c, us in found.items()))
    return found


def best_of(times: Times) -> Config:
    return min(times, key=lambda config: times[config])


def report(bench: Bench, rows: int, times: Times) -> None:
    best = best_of(times)
    us, floor = times[best], bench.bytes / 4.2e6
    print(
        f"best {bench.gemm.name:8} {rows:3} rows: {us:6.1f} us, floor {floor:5.1f}, {bench.bytes / us / 1e6:.2f} TB/s,"
        f" {short(best)}",
        flush=True,
    )


def jobs_of(benches: list[Bench], *, quick: bool) -> Iterator[tuple[Bench, int, list[Config]]]:
    for rows in ROWS:
        for bench in benches:
            chosen = choose_int4(rows, bench.gemm.outputs, bench.gemm.inputs, gated=bench.gemm.gated)
            assert chosen is not None
            yield bench, rows, [chosen] if quick else list(dict.fromkeys([chosen, *candidates(bench.gemm, rows)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["linears", "experts"], default="linears")
    parser.add_argument("--quick", action="store_true", help="only the launches that are chosen")
    given = parser.parse_args()
    if given.part == "experts":
        int4_experts.main()
    else:
        measure_linears(quick=given.quick)


def measure_linears(*, quick: bool) -> None:
    torch.manual_seed(0)
    start = time.perf_counter()
    small = [Bench(gemm, 1) for gemm in SMALL]
    benches = [Bench(gemm, COPIES) for gemm in GEMMS]
    jobs = list(jobs_of(benches, quick=quick))
    flat = [(bench, rows, config) for bench, rows, configs in jobs for config in configs]
    chosen = [
        (bench, rows, choose_int4(rows, bench.gemm.outputs, bench.gemm.inputs, gated=bench.gemm.gated))
        for bench in small
        for rows in (1, 5, 40)
    ]
    compile_all([*flat, *((bench, rows, config) for bench, rows, config in chosen if config)])
    check_small(small)
    for bench in benches:
        attempt(f"unpack {bench.gemm.name}", partial(check_unpacking, bench))
        attempt(f"split-K {bench.gemm.name}", partial(check_split_k, bench))
    found = [(bench, rows, measure(bench, rows, configs)) for bench, rows, configs in jobs]
    found = [(bench, rows, times) for bench, rows, times in found if times]
    late = [(bench, rows, best_of(times)._replace(pdl=False)) for bench, rows, times in found]
    compile_all(late)
    for (bench, rows, times), (_, _, config) in zip(found, late, strict=True):
        times |= measure(bench, rows, [config])
        report(bench, rows, times)
    for rows in ROWS:
        total = sum(min(times.values()) for _, of, times in found if of == rows)
        print(f"{rows} rows: a layer {total:.1f} us, {LAYERS} layers {total * LAYERS / 1e3:.2f} ms")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
