"""The matrix products of a decode step on a GPU: cuBLAS against `saccade.kernels.gemm.skinny`, alone and in a chain.

    python -m benchmarks.linear_gpu

Shapes are those of Qwen2-VL-2B in bfloat16. Every time is that of a CUDA graph over different weights in a row, so that
the second cache does not help. The last line is JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import attempt, graph_us
from saccade.kernels.gemm.skinny import (
    Config,
    SplitWorkspace,
    choose,
    choose_splits,
    gated_linear,
    norm_gated_linear,
    norm_linear,
    skinny_linear,
)
from saccade.kernels.ops.norm import add_rms_norm, silu_and_mul

LAYERS, HIDDEN, WIDE, QKV, VOCABULARY = 28, 1536, 8960, 2048, 151936
EPS = 1e-6
ROWS = (1, 8, 16, 32, 64, 128)
STACK_ROWS = (1, 8, 32, 128)
FEW_ROWS = 16  # up to which a launch norms its own rows and adds the residual
PEAK = 4.3e12  # bytes a second that a copy reaches
DEVICE = torch.device("cuda")


class Shape(NamedTuple):
    name: str
    n: int  # outputs; of the gate alone where there is one
    k: int
    gated: bool = False
    normed: bool = False  # when rows are few
    biased: bool = False
    copies: int = LAYERS

    @property
    def bytes(self) -> int:
        return self.n * self.k * 2 * (2 if self.gated else 1)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qkv", QKV, HIDDEN, normed=True, biased=True),
        Shape("out", HIDDEN, HIDDEN),
        Shape("gate_up", WIDE, HIDDEN, gated=True, normed=True),
        Shape("down", HIDDEN, WIDE),
        Shape("head", VOCABULARY, HIDDEN, normed=True, copies=3),
    )
}


class Case(NamedTuple):
    """One product of a shape with m rows."""

    shape: Shape
    m: int

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.m}"

    @property
    def chosen(self) -> Config | None:
        return choose(self.m, self.shape.n, self.shape.k, torch.bfloat16, gated=self.shape.gated)


class Bench:
    """Weights of every layer, and the same product in three ways: our launch, library calls, float32."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = {name: [_weight(shape) for _ in range(shape.copies)] for name, shape in SHAPES.items()}
        self.norm = torch.rand(HIDDEN, device=DEVICE, dtype=torch.bfloat16) + 0.5
        self.bias = torch.randn(QKV, device=DEVICE, dtype=torch.bfloat16)
        self.workspace = SplitWorkspace.allocate(128, DEVICE)
        self.inputs = {k: torch.randn(128, k, device=DEVICE, dtype=torch.bfloat16) for k in (HIDDEN, WIDE)}

    def arguments(self, case: Case) -> tuple[Tensor, Tensor | None]:
        """Rows, and what is added to the result: the two products back to the hidden size do that for few rows."""
        adds = case.shape.n == HIDDEN and case.m <= FEW_ROWS
        return self.inputs[case.shape.k][: case.m], self.inputs[HIDDEN][: case.m] if adds else None

    def ours(self, shape: Shape, x: Tensor, residual: Tensor | None, weight: Tensor, config: Config) -> Tensor:
        normed, bias, room = shape.normed and len(x) <= FEW_ROWS, self.bias if shape.biased else None, self.workspace
        if shape.gated and normed:
            return norm_gated_linear(x, self.norm, EPS, weight, config=config)
        if shape.gated:
            return gated_linear(x, weight, config=config)
        if normed:
            return norm_linear(x, self.norm, EPS, weight, bias, workspace=room, config=config)
        return skinny_linear(x, weight, bias, residual, workspace=room, config=config)

    def calls(self, shape: Shape, x: Tensor, residual: Tensor | None, weight: Tensor) -> Tensor:
        if shape.normed and len(x) <= FEW_ROWS:
            x = F.rms_norm(x, self.norm.shape, self.norm, EPS)
        out = F.linear(x, weight, self.bias if shape.biased else None)
        if shape.gated:
            return silu_and_mul(out)
        return out if residual is None else out.add_(residual)

    def exact(self, shape: Shape, x: Tensor, residual: Tensor | None, weight: Tensor) -> Tensor:
        x = x.float()
        if shape.normed and len(x) <= FEW_ROWS:
            x = F.rms_norm(x, self.norm.shape, self.norm.float(), EPS)
        out = F.linear(x, weight.float(), self.bias.float() if shape.biased else None)
        if shape.gated:
            gate, up = out.chunk(2, dim=-1)
            return F.silu(gate) * up
        return out if residual is None else out + residual.float()


def _weight(shape: Shape) -> Tensor:
    outputs = shape.n * (2 if shape.gated else 1)
    return torch.randn(outputs, shape.k, device=DEVICE, dtype=torch.bfloat16).mul_(shape.k**-0.5)


# --- what is tried ------------------------------------------------------------------------------------------------

# outputs, inputs, warps, stages
_VECTORS = [(4, 512, 4, 4), (4, 1024, 4, 4), (8, 512, 4, 3), (4, 512, 4, 1), (8, 512, 8, 1)]
_TILES = {
    16: [(16, 256, 1, 5), (16, 128, 1, 8), (32, 64, 2, 6), (64, 64, 4, 5), (64, 128, 4, 3)],
    32: [(64, 128, 4, 4), (64, 64, 4, 5), (64, 64, 4, 3), (32, 128, 4, 3), (128, 64, 4, 4)],
    64: [(64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4), (32, 128, 4, 3)],
    128: [(64, 64, 4, 4), (64, 64, 8, 3), (64, 128, 8, 3), (128, 64, 8, 3), (32, 64, 4, 3)],
}


def candidates(case: Case) -> list[Config]:
    shape, rows = case.shape, max(16, case.m)
    tiles = [Config(rows, o, i, _splits(shape, o, i), w, s, pdl=False) for o, i, w, s in _TILES[rows]]
    if case.m == 1:
        return [Config(1, o, i, warps=w, stages=s, pdl=False) for o, i, w, s in _VECTORS] + tiles[:1]
    extra = [tiles[0]._replace(splits=2 * tiles[0].splits)] if shape.name == "down" else []
    return tiles + extra


def _splits(shape: Shape, outputs: int, inputs: int) -> int:
    return 1 if shape.gated else choose_splits(shape.n, shape.k, outputs, inputs)


# --- measuring ----------------------------------------------------------------------------------------------------


def compile_all(bench: Bench, jobs: Sequence[tuple[Case, Config]]) -> None:
    """Each launch once; most of a compilation runs outside Python's lock, so threads do several at a time."""
    start = time.perf_counter()

    def once(job: tuple[Case, Config]) -> None:
        case, config = job
        run = partial(bench.ours, case.shape, *bench.arguments(case), bench.weights[case.shape.name][0], config)
        attempt(f"{case.name} {_short(config)}", run)

    distinct = list({(case.shape, config): (case, config) for case, config in jobs}.values())
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(once, distinct))
    torch.cuda.synchronize()
    print(f"{len(distinct)} launches compiled in {time.perf_counter() - start:.1f} s", flush=True)


def product_us(bench: Bench, shape: Shape, multiply: Callable[[Tensor], Tensor]) -> float:
    weights = bench.weights[shape.name]
    return graph_us(lambda: [multiply(weight) for weight in weights]) / len(weights)


def our_us(bench: Bench, case: Case, config: Config) -> float:
    """Also that the result is right."""
    arguments, weight = bench.arguments(case), bench.weights[case.shape.name][0]
    expected = bench.exact(case.shape, *arguments, weight)
    run = partial(bench.ours, case.shape, *arguments, config=config)
    error = float((run(weight).float() - expected).norm() / expected.norm())
    if not error < 1e-2:
        raise ValueError(f"relative error {error}")
    return product_us(bench, case.shape, run)


def _short(config: Config) -> str:
    text = "x".join(map(str, (config.rows, config.outputs, config.inputs)))
    return f"{text}/{config.splits}w{config.warps}s{config.stages}" + (f"a{config.prefetch}" if config.pdl else "")


# --- the products one by one --------------------------------------------------------------------------------------


class Times(NamedTuple):
    cublas: float  # F.linear alone
    calls: float  # library calls for all that our launch does
    ours: dict[Config, float]

    @property
    def best(self) -> Config | None:
        """None where the library is faster."""
        config = min(self.ours, key=lambda one: self.ours[one], default=None)
        return config if config is not None and self.ours[config] < self.calls else None

    def record(self) -> dict[str, float]:
        found = {"cublas": self.cublas, "library": self.calls} | {_short(c): us for c, us in self.ours.items()}
        return {name: round(us, 1) for name, us in found.items()}


def compare(bench: Bench, case: Case) -> Times:
    x, residual = bench.arguments(case)
    cublas = product_us(bench, case.shape, partial(F.linear, x))
    calls = product_us(bench, case.shape, partial(bench.calls, case.shape, x, residual))
    return Times(cublas, calls, measure(bench, case, candidates(case)))


def measure(bench: Bench, case: Case, configs: Sequence[Config]) -> dict[Config, float]:
    found = {c: attempt(f"{case.name} {_short(c)}", partial(our_us, bench, case, c)) for c in configs}
    return {config: us for config, us in found.items() if us is not None}


def report(case: Case, times: Times) -> None:
    size, fastest = case.shape.bytes, min(times.ours.values(), default=times.calls)
    print(
        f"{case.name:12} floor {size / PEAK * 1e6:6.1f}  cublas {times.cublas:6.1f}  library {times.calls:6.1f}"
        f"  ours {fastest:6.1f} us = {size / fastest / 1e6:.2f} TB/s |",
        *(f"{'*' if c == times.best else ''}{_short(c)} {us:.1f} |" for c, us in times.ours.items()),
        flush=True,
    )


# --- the chain ----------------------------------------------------------------------------------------------------

Choice = Mapping[str, Config | None]  # None: library calls


class Stack:
    """A decode step without attention: the first columns of qkv stand for what it would give."""

    def __init__(self, bench: Bench, choice: Choice) -> None:
        self.bench, self.choice = bench, choice

    def multiply(self, name: str, x: Tensor, layer: int, residual: Tensor | None = None) -> Tensor:
        shape, weight, config = SHAPES[name], self.bench.weights[name][layer], self.choice[name]
        if config is None:
            return self.bench.calls(shape, x, residual, weight)
        return self.bench.ours(shape, x, residual, weight, config)

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if len(x) <= FEW_ROWS else self.many(x)

    def few(self, x: Tensor) -> Tensor:
        """Four launches a layer: norms, gate and residuals are inside the products."""
        for layer in range(LAYERS):
            x = self.multiply("out", self.multiply("qkv", x, layer)[:, :HIDDEN], layer, x)
            x = self.multiply("down", self.multiply("gate_up", x, layer), layer, x)
        return self.multiply("head", x, 0)

    def many(self, x: Tensor) -> Tensor:
        """Six launches a layer: norms add the residual and have launches of their own."""
        norm = self.bench.norm
        normed = F.rms_norm(x, norm.shape, norm, EPS)
        for layer in range(LAYERS):
            mixed = self.multiply("qkv", normed, layer)[:, :HIDDEN]
            normed, x = add_rms_norm(self.multiply("out", mixed, layer), x, norm, EPS)
            wide = self.multiply("gate_up", normed, layer)
            normed, x = add_rms_norm(self.multiply("down", wide, layer), x, norm, EPS)
        return self.multiply("head", normed, 0)


def plain_stack(bench: Bench, x: Tensor) -> Tensor:
    """The same in PyTorch alone."""
    norm, weights = partial(F.rms_norm, normalized_shape=[HIDDEN], weight=bench.norm, eps=EPS), bench.weights
    for layer in range(LAYERS):
        mixed = F.linear(norm(x), weights["qkv"][layer], bench.bias)[:, :HIDDEN]
        x = F.linear(mixed, weights["out"][layer]).add_(x)
        gate, up = F.linear(norm(x), weights["gate_up"][layer]).chunk(2, dim=-1)
        x = F.linear(F.silu(gate).mul_(up), weights["down"][layer]).add_(x)
    return F.linear(norm(x), weights["head"][0])


def stack_ms(bench: Bench, m: int, choices: Mapping[str, Choice]) -> dict[str, float]:
    x = bench.inputs[HIDDEN][:m].clone()
    expected = plain_stack(bench, x).float()
    times = {"torch": graph_us(partial(plain_stack, bench, x)) / 1e3}
    for name, choice in choices.items():
        run = partial(Stack(bench, choice), x)
        us = attempt(f"stack {m} {name}", partial(graph_us, run))
        if us is not None:
            times[name] = us / 1e3
            error = float((run().float() - expected).norm() / expected.norm())
            print(f"stack m={m:<4} {name:13} {us / 1e3:.3f} ms, torch {times['torch']:.3f}, differs by {error:.1e}")
    return {name: round(ms, 3) for name, ms in times.items()}


def choices_for(m: int, late: Mapping[Case, Times], early: Mapping[Case, Times]) -> dict[str, Choice]:
    cases = [Case(shape, m) for shape in SHAPES.values()]
    every: dict[str, Choice] = {
        "library": dict.fromkeys(SHAPES),
        "chosen": {case.shape.name: case.chosen for case in cases},
        "chosen early": {case.shape.name: ahead(case.chosen) for case in cases},
    }
    if all(case in late for case in cases):
        every["best"] = {case.shape.name: late[case].best for case in cases}
        every["best early"] = {case.shape.name: early[case].best for case in cases}
        every["all early"] = {case.shape.name: ahead(late[case].best) for case in cases}
    return every


def ahead(config: Config | None, lines: int = 8) -> Config | None:
    return config and config._replace(pdl=True, prefetch=lines)


# --- all of it ----------------------------------------------------------------------------------------------------


def main() -> None:
    start = time.perf_counter()
    bench = Bench()
    cases = [Case(shape, m) for shape in SHAPES.values() for m in ROWS]
    chosen = [(case, config) for case in cases if (config := case.chosen)]
    compile_all(bench, [(case, config) for case in cases for config in candidates(case)] + chosen)
    late: dict[Case, Times] = {}
    for case in cases:
        times = attempt(case.name, partial(compare, bench, case))
        if times is not None:
            late[case] = times
            report(case, times)
    compile_all(bench, [(case, config._replace(pdl=True, prefetch=8)) for case, config in chosen])
    early = measure_early(bench, late)
    stacks = {m: attempt(f"stack {m}", partial(stack_ms, bench, m, choices_for(m, late, early))) for m in STACK_ROWS}
    record: dict[str, Any] = {"products": {case.name: times.record() for case, times in early.items()}, "stack": stacks}
    print(f"{time.perf_counter() - start:.0f} s in all")
    print(json.dumps(record, separators=(",", ":")))


def measure_early(bench: Bench, late: Mapping[Case, Times]) -> dict[Case, Times]:
    """With the best launches again, started while the one ahead of them still runs."""
    jobs = {case: config for case, times in late.items() if (config := ahead(times.best))}
    compile_all(bench, list(jobs.items()))
    found = dict(late)
    for case, config in jobs.items():
        found[case] = late[case]._replace(ours=late[case].ours | measure(bench, case, [config]))
        report(case, found[case]._replace(ours={c: us for c, us in found[case].ours.items() if c.prefetch}))
    return found


if __name__ == "__main__":
    main()
