"""Gated delta net kernels on a GPU: errors against the layer in float32, and the time of every candidate launch.

    python -m benchmarks.gdn_gpu

Shapes are those of Qwen3.5 in bfloat16. Every time is that of a CUDA graph over the states and inputs of several
layers, so that L2 does not help. A line of a check says PASS or FAIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.linear_gpu import attempt, graph_us
from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.kernels.gdn.decode import DecodeConfig, allocate_counters, gdn_decode
from saccade.kernels.gdn.layout import GDNShape, GDNStates, GDNWeights
from saccade.kernels.gdn.prefill import GDNPrefill, PrefillConfig, PrefillWorkspace
from saccade.kernels.gdn.prefill_plan import ChunkPlan, max_chunks, plan_chunks
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.state_dict import Parameters

QWEN_9B = GDNShape(16, 32, 128, 128, 4)
QWEN_27B = GDNShape(16, 48, 128, 128, 4)
BANDWIDTH = 4.2e12  # bytes a second
FLOPS = 700e12
COLD = 160 << 20  # bytes that a graph goes through before it comes back: three times L2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_PIECES = 64

DECODE = [DecodeConfig(warps, early) for warps in (4, 8, 16) for early in (True, False)]
CHUNKS = [
    PrefillConfig(chunk_warps=warps, chunk_registers=registers)
    for warps, registers in ((4, None), (8, None), (4, 168), (8, 128), (4, 128))
]
SCANS = [
    PrefillConfig(block=block, scan_warps=warps, scan_stages=stages)
    for block, warps, stages in (
        (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 8, 2), (128, 4, 2), (32, 4, 2), (32, 4, 3), (32, 2, 3),
        (16, 1, 2), (16, 4, 3),
    )
]  # fmt: skip
OUTPUTS = [
    PrefillConfig(output_warps=warps, output_registers=registers)
    for warps, registers in ((4, None), (8, None), (4, 168), (4, 128), (8, 128))
]


class Piece(NamedTuple):
    length: int
    row: int
    keep: int = -1


class Layer:
    """Random weights, states and inputs. Decays and betas are as wide as in a trained model."""

    def __init__(self, shape: GDNShape, rows: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = shape
        heads = shape.value_heads

        def random(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, device=DEVICE, dtype=torch.float32).to(dtype)

        decay = torch.empty(heads, device=DEVICE).uniform_(0.5, 16).log().to(dtype)
        norm = 1 + 0.1 * random(shape.value_dim)
        self.weights = GDNWeights(random(shape.channels, 1, shape.kernel) / 2, decay, random(heads) - 3, norm, 1e-6)
        past = random(rows, shape.kernel - 1, shape.channels).transpose(1, 2)
        memory = random(rows, heads, shape.key_dim, shape.value_dim, dtype=torch.float32) / 4
        self.states = GDNStates(past, memory)
        self.projected = random(tokens, shape.width)

    def in_another_dtype(self, dtype: torch.dtype) -> Layer:
        """The same numbers, and states of its own."""
        twin = Layer.__new__(Layer)
        twin.shape = self.shape
        twin.weights = GDNWeights(*(weight.to(dtype) for weight in self.weights[:4]), eps=self.weights.eps)
        past = self.states.conv.transpose(1, 2).to(dtype, copy=True).transpose(1, 2)
        twin.states = GDNStates(past, self.states.recurrent.clone())
        twin.projected = self.projected.to(dtype)
        return twin

    def copy(self) -> Layer:
        return self.in_another_dtype(self.projected.dtype)

    def reference(self, pieces: Sequence[Piece], *, together: bool = False) -> Tensor:
        """By the layer in PyTorch. `together`: pieces of equal length at once."""
        text = TextConfig(8, 8, 1, 1, 1, 8, 8, 8, self.weights.eps, 1e4, None, {}, False, "qwen3_5")
        params = Parameters(self.projected.dtype, DEVICE)
        layer: Any = GatedDeltaNet(params, text, LinearConfig((0,), *self.shape))
        layer.conv, layer.decay, layer.decay_bias, layer.norm.weight = self.weights[:4]
        layer.inputs = layer.out = lambda x: x
        firsts = [sum(piece.length for piece in pieces[:i]) for i in range(len(pieces))]
        tokens = [torch.arange(i, i + piece.length, device=DEVICE) for i, piece in zip(firsts, pieces, strict=True)]
        rows = torch.tensor([piece.row for piece in pieces], device=DEVICE)
        if together:
            groups = [WindowGroup(torch.stack(tokens), rows)]
        else:
            kept = [None if p.keep < 0 else torch.tensor([p.keep], device=DEVICE) for p in pieces]
            groups = [WindowGroup(t[None], r[None], k) for t, r, k in zip(tokens, rows, kept, strict=True)]
        states = States(self.states.conv[None], self.states.recurrent[None], groups)
        found: Tensor = layer(self.projected[: sum(piece.length for piece in pieces)], states, 0)
        return found

    def decode(self, rows: Tensor, counters: Tensor, config: DecodeConfig | None = None) -> Tensor:
        return gdn_decode(self.projected, rows, self.shape, self.weights, self.states, counters, config=config)

    def prefill(
        self, plan: ChunkPlan, workspace: PrefillWorkspace | None = None, config: PrefillConfig | None = None
    ) -> GDNPrefill:
        if workspace is None:
            workspace = PrefillWorkspace.allocate(len(plan.chunks), self.shape, self.projected.dtype, DEVICE)
        config = config or PrefillConfig()
        return GDNPrefill(self.projected, plan, self.shape, self.weights, self.states, workspace, config)


def ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def plan_of(pieces: Sequence[Piece], tokens: int, capacity: int) -> ChunkPlan:
    unused = capacity - len(pieces)
    starts = [sum(piece.length for piece in pieces[:i]) for i in range(len(pieces) + 1)]
    rows = ints([piece.row for piece in pieces] + [-1] * unused)
    keep = ints([piece.keep for piece in pieces] + [-1] * unused)
    return plan_chunks(ints(starts + starts[-1:] * unused), rows, keep, tokens)


# --- is it right --------------------------------------------------------------------------------------------------


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def verdict(name: str, found: Tensor, expected: Tensor, limit: float, yardstick: Tensor | None = None) -> None:
    """`yardstick`: what PyTorch computes in the same type."""
    error = relative(found, expected)
    worst = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    beside = "" if yardstick is None else f", PyTorch in this type {relative(yardstick, expected):.1e}"
    passed = "PASS" if error <= limit else "FAIL"
    print(f"{passed} {name:44} error {error:.1e}, at most {limit:.0e}; largest {worst:.1e} of the maximum{beside}")


def check_decode(shape: GDNShape, tokens: int, dtype: torch.dtype, limit: float) -> None:
    ours = Layer(shape, tokens + 2, tokens, dtype)
    exact = ours.in_another_dtype(torch.float32)
    torchs = ours.copy()
    rows = list(range(tokens, 0, -1))
    counters = allocate_counters(tokens, shape, DEVICE)
    pieces = [Piece(1, row) for row in rows]
    for _ in range(3):
        found = ours.decode(ints(rows), counters)
        expected = exact.reference(pieces, together=True)
        beside = torchs.reference(pieces, together=True)
    name = f"decode {tokens}, {shape.value_heads} heads, {str(dtype)[6:]}"
    verdict(f"{name}: outputs", found, expected, limit, beside)
    verdict(f"{name}: states", ours.states.recurrent, exact.states.recurrent, limit, torchs.states.recurrent)
    is_same = torch.equal(ours.states.conv, torchs.states.conv) and not counters.any()
    print("PASS" if is_same else "FAIL", f"{name}: convolution states and counters")


def check_prefill(shape: GDNShape, pieces: Sequence[Piece], dtype: torch.dtype, limit: float) -> None:
    tokens = sum(piece.length for piece in pieces)
    rows = 2 + max(max(piece.row, piece.keep) for piece in pieces)
    ours = Layer(shape, rows, tokens + 70, dtype)
    exact = ours.in_another_dtype(torch.float32)
    torchs = ours.copy()
    again = ours.copy()
    plan = plan_of(pieces, tokens + 70, MAX_PIECES)
    found = ours.prefill(plan)()
    expected = exact.reference(pieces)
    beside = torchs.reference(pieces)
    name = f"prefill {'+'.join(str(p.length) for p in pieces)[:20]}, {shape.value_heads} heads, {str(dtype)[6:]}"
    verdict(f"{name}: outputs", found[:tokens], expected, limit, beside)
    verdict(f"{name}: states", ours.states.recurrent, exact.states.recurrent, limit, torchs.states.recurrent)
    repeated = again.prefill(plan)()
    is_same = torch.equal(ours.states.conv, torchs.states.conv) and not found[tokens:].any()
    is_same = is_same and torch.equal(found, repeated) and torch.equal(ours.states.recurrent, again.states.recurrent)
    print("PASS" if is_same else "FAIL", f"{name}: convolution states, padding, a second run is equal", flush=True)


def check_continuation() -> None:
    """A long window in steps, then decode, against all of it at once."""
    ours = Layer(QWEN_9B, 3, 321)
    exact = ours.in_another_dtype(torch.float32)
    every = ours.projected
    parts = []
    for first, end in ((0, 100), (100, 101), (101, 320)):
        ours.projected = every[first:end]
        parts.append(ours.prefill(plan_of([Piece(end - first, 1)], end - first, 4))())
    ours.projected = every[320:]
    parts.append(ours.decode(ints([1]), allocate_counters(1, QWEN_9B, DEVICE)))
    verdict("100 + 1 + 219 tokens and decode: outputs", torch.cat(parts), exact.reference([Piece(321, 1)]), 1e-2)
    verdict("100 + 1 + 219 tokens and decode: states", ours.states.recurrent, exact.states.recurrent, 1e-2)


def check_all() -> None:
    half = torch.bfloat16
    work: list[Callable[[], None]] = [
        partial(check_decode, QWEN_9B, 1, half, 4e-3),
        partial(check_decode, QWEN_9B, 32, half, 4e-3),
        partial(check_decode, QWEN_27B, 8, half, 4e-3),
        partial(check_decode, QWEN_9B, 8, torch.float32, 1e-5),
        partial(check_prefill, QWEN_9B, [Piece(1600, 1)], half, 1e-2),
        partial(check_prefill, QWEN_9B, [Piece(8192, 1)], half, 1e-2),
        partial(check_prefill, QWEN_9B, [Piece(n, i) for i, n in enumerate((1, 3, 63, 64, 65, 200))], half, 1e-2),
        partial(check_prefill, QWEN_9B, [Piece(100, 1, 4), Piece(2, 1, 5), Piece(300, 1), Piece(70, 3)], half, 1e-2),
        partial(check_prefill, QWEN_27B, [Piece(400, 1)], half, 1e-2),
        partial(check_prefill, QWEN_9B, [Piece(200, 1), Piece(65, 0)], torch.float16, 3e-3),
        partial(check_prefill, QWEN_9B, [Piece(200, 1), Piece(65, 0)], torch.float32, 1e-4),
        check_continuation,
    ]
    for one in work:
        attempt("check", one)


# --- how long does it take ----------------------------------------------------------------------------------------


def decode_layers(shape: GDNShape, tokens: int) -> list[Layer]:
    size = 4 * tokens * shape.value_heads * shape.key_dim * shape.value_dim
    return [Layer(shape, tokens, tokens) for _ in range(min(max(-(-COLD // size), 4), 32))]


def time_decode(shape: GDNShape, tokens: int, configs: Sequence[DecodeConfig]) -> None:
    layers = decode_layers(shape, tokens)
    rows = ints(torch.randperm(tokens).tolist())
    counters = allocate_counters(tokens, shape, DEVICE)
    state = 8 * shape.value_heads * shape.key_dim * shape.value_dim
    rest = 2 * (2 * (shape.kernel - 1) * shape.channels + shape.width + shape.value_heads * shape.value_dim)
    floor = tokens * (state + rest) / BANDWIDTH * 1e6
    for config in configs:

        def run(config: DecodeConfig = config) -> None:
            for layer in layers:
                layer.decode(rows, counters, config)

        us = attempt(f"decode {tokens} {config}", partial(graph_us, run))
        if us is not None:
            us /= len(layers)
            name = f"decode {tokens:3} {shape.value_heads} heads, {config.warps:2} warps, early {config.early!s:5}"
            print(f"{name} {us:7.2f} us, floor {floor:6.2f}, {floor / us:4.0%} of it", flush=True)


class Prefill:
    """The same windows in several layers, which share a workspace."""

    def __init__(self, shape: GDNShape, lengths: Sequence[int], capacity: int) -> None:
        self.tokens = sum(lengths)
        self.shape = shape
        self.capacity = capacity
        self.name = f"{self.tokens} tokens in {len(lengths)}, {shape.value_heads} heads, for {capacity} pieces"
        copies = min(max(-(-COLD // (2 * self.tokens * shape.width)), 3), 16)
        self.layers = [Layer(shape, len(lengths) + 1, self.tokens) for _ in range(copies)]
        self.plan = plan_of([Piece(length, row) for row, length in enumerate(lengths)], self.tokens, capacity)
        chunks = max_chunks(self.tokens, capacity)
        self.workspace = PrefillWorkspace.allocate(chunks, shape, torch.bfloat16, DEVICE)
        self.out = self.layers[0].projected.new_empty(self.tokens, shape.value_heads * shape.value_dim)

    def us(self, what: str, config: PrefillConfig) -> float | None:
        """Of one launch, or of all."""
        works = [layer.prefill(self.plan, self.workspace, config) for layer in self.layers]

        def run() -> None:
            for work in works:
                if what == "all":
                    work(self.out)
                elif what == "write_outputs":
                    work.write_outputs(self.out)
                else:
                    getattr(work, what)()

        us = attempt(f"{what} {config}", partial(graph_us, run))
        return None if us is None else us / len(works)

    def floor(self) -> float:
        shape = self.shape
        tokens = self.tokens
        heads = shape.value_heads
        size = shape.value_dim * shape.key_dim
        bytes_ = 2 * tokens * (shape.width + heads * shape.value_dim) + 8 * heads * size
        multiplied = 2 * tokens * heads * (3 * size + 64 * (2 * shape.key_dim + 2 * shape.value_dim))
        return max(bytes_ / BANDWIDTH, multiplied / FLOPS) * 1e6


PARTS = {
    "prepare_chunks": (CHUNKS, ("chunk_warps", "chunk_registers")),
    "scan_states": (SCANS, ("block", "scan_warps", "scan_stages")),
    "write_outputs": (OUTPUTS, ("output_warps", "output_registers")),
    "store_past": ([PrefillConfig()], ()),
}


def time_prefill(prefill: Prefill, *, all_candidates: bool) -> None:
    config = PrefillConfig()
    default = prefill.us("all", config)
    if default is None:
        return
    floor = prefill.floor()
    print(f"prefill {prefill.name}: {default:7.1f} us a layer, floor {floor:5.1f}, {floor / default:4.0%}", flush=True)
    for what, (candidates, fields) in PARTS.items():
        found = {}
        for one in candidates if all_candidates else [config]:
            us = prefill.us(what, one)
            if us is not None:
                found[tuple(getattr(one, field) for field in fields)] = us
        print(f"    {what:15}", *(f"{key} {us:.1f} |" for key, us in found.items()), flush=True)
        if found:
            config = config._replace(**dict(zip(fields, min(found, key=lambda key: found[key]), strict=True)))
    if all_candidates:
        best = prefill.us("all", config)
        print(f"    best of each: {best or 0:.1f} us a layer with {config}", flush=True)


def compile_all() -> None:
    """Each candidate once; most of a compilation runs outside Python's lock."""
    start = time.perf_counter()
    counters = allocate_counters(8, QWEN_9B, DEVICE)
    layer = Layer(QWEN_9B, 8, 8)
    plan = plan_of([Piece(8, 0)], 8, 2)
    out = layer.projected.new_empty(8, QWEN_9B.value_heads * QWEN_9B.value_dim)
    layer.prefill(plan).store_past()
    jobs: list[Callable[[], object]] = [partial(layer.decode, ints(range(8)), counters, one) for one in DECODE]
    jobs += [layer.prefill(plan, None, one).prepare_chunks for one in CHUNKS]
    jobs += [layer.prefill(plan, None, one).scan_states for one in SCANS]
    jobs += [partial(layer.prefill(plan, None, one).write_outputs, out) for one in OUTPUTS]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: attempt("compile", job), jobs))
    torch.cuda.synchronize()
    print(f"{len(jobs)} launches compiled in {time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # the reference is float32
    with torch.inference_mode():
        compile_all()
        check_all()
        print(f"checked after {time.perf_counter() - start:.1f} s", flush=True)
        for tokens in (1, 8, 32, 128):
            time_decode(QWEN_9B, tokens, DECODE)
        time_decode(QWEN_27B, 32, DECODE[2:3])
        time_prefill(Prefill(QWEN_9B, [1600], 4), all_candidates=True)
        time_prefill(Prefill(QWEN_9B, [1600], MAX_PIECES), all_candidates=False)
        time_prefill(Prefill(QWEN_9B, [64], 4), all_candidates=False)
        time_prefill(Prefill(QWEN_9B, [400] * 4, 8), all_candidates=True)
        time_prefill(Prefill(QWEN_9B, [8192], 8), all_candidates=True)
        time_prefill(Prefill(QWEN_27B, [1600], 4), all_candidates=False)
    print(f"done in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
