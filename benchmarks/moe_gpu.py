"""MoE kernels on a GPU: are they right, and how long do the candidates of each launch take?

    python -m benchmarks.moe_gpu [tokens ...]

Shapes are those of Qwen3-VL-30B-A3B and Qwen3.5-35B-A3B (with its shared expert as the ninth of each token) in
bfloat16; DeepSeek-VL2's are checked only. Every time is that of a CUDA graph over different tokens in a row: they
touch other experts, so the weights come from memory. Floors: bytes of the touched experts at 4.2 TB/s, or FLOP at 700
TFLOP/s.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import attempt, capture, graph_us
from saccade.kernels.launch.device import shared_memory
from saccade.kernels.moe.combine import combine
from saccade.kernels.moe.experts import TileConfig, moe_down, moe_gate_up
from saccade.kernels.moe.experts_gemv import VectorConfig, vector_down, vector_gate_up
from saccade.kernels.moe.fused_moe import (
    MoELaunch,
    MoEWeights,
    choose,
    fused_moe,
    run_experts,
    supports_tma,
)
from saccade.kernels.moe.router_gemm import RouterConfig, choose_router, router_logits, split_router
from saccade.kernels.moe.sorting import sort_by_expert
from saccade.kernels.moe.topk_routing import Routed, RoutingRules, route

BANDWIDTH = 4.2e12  # bytes a second
FLOPS = 700e12
TOKENS = (1, 4, 8, 32, 128, 256, 512, 1600, 8192)
SAMPLE = 48  # tokens that are compared
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


class Shape(NamedTuple):
    name: str
    hidden: int
    width: int
    experts: int
    rules: RoutingRules
    has_bias: bool = False

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.width * 2


QWEN3_VL = Shape("Qwen3-VL-30B-A3B", 2048, 768, 128, RoutingRules(8, normalise=True))
QWEN3_5 = Shape("Qwen3.5-35B-A3B", 2048, 512, 256, RoutingRules(8, normalise=True, shared=1, shared_gate=True))
DEEPSEEK = Shape("DeepSeek-VL2", 2560, 1536, 72, RoutingRules(6, True, True, 2.5, 8, 3, shared=2), True)
DEEPSEEK_SMALL = Shape("DeepSeek-VL2-Small", 2048, 896, 64, RoutingRules(6, shared=2))


def make_weights(shape: Shape) -> MoEWeights:
    count = shape.experts + shape.rules.shared
    router = torch.randn(shape.experts + int(shape.rules.shared_gate), shape.hidden, device=DEVICE)
    bias = torch.randn(shape.experts, device=DEVICE) / 10 if shape.has_bias else None
    gate_up = torch.randn(count, 2 * shape.width, shape.hidden, device=DEVICE, dtype=BF16)
    down = torch.randn(count, shape.hidden, shape.width, device=DEVICE, dtype=BF16)
    parts = split_router(router * shape.hidden**-0.5)
    return MoEWeights(parts, bias, gate_up.mul_(shape.hidden**-0.5), down.mul_(shape.width**-0.5))


def inputs(shape: Shape, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(tokens, shape.hidden, device=DEVICE, dtype=BF16, generator=generator)


# --- correctness --------------------------------------------------------------------------------------------------


def exact_experts(x: Tensor, weights: MoEWeights, routed: Routed, only: Tensor) -> Tensor:
    """Of the tokens `only`, in float32."""
    rows, scales, experts = x[only].float(), routed.weights[only], routed.experts[only]
    out = torch.zeros_like(rows)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(rows[token], weights.gate_up[expert].float()).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * up, weights.down[expert].float())
        out.index_add_(0, token, made * scales[token, slot, None])
    return out


def reference_route(logits: Tensor, rules: RoutingRules, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float64, as the layer does it."""
    scores = logits.sigmoid() if rules.sigmoid else logits.softmax(-1)
    selection = scores if bias is None else scores + bias
    if rules.groups > 1:
        grouped = selection.view(len(selection), rules.groups, -1)
        best = grouped.topk(1 if bias is None else 2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(rules.groups_kept).indices, True)
        selection = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    experts = selection.topk(rules.top_k).indices
    found = scores.gather(1, experts)
    if rules.normalise:
        found = found / (found.sum(-1, keepdim=True) + 1e-20)
    return found * rules.scale, experts


def verdict(name: str, error: float, limit: float) -> None:
    print(f"{'PASS' if error <= limit else 'FAIL'} {name}: {error:.2e} (limit {limit:.0e})", flush=True)


def check_routing(shape: Shape, weights: MoEWeights, tokens: int) -> None:
    x = inputs(shape, tokens, seed=7)
    weight = weights.router.double().sum(0)
    exact = x.double() @ weight.T
    parts = router_logits(x, weights.router)
    torch.backends.cuda.matmul.allow_tf32 = True
    tf32 = float((F.linear(x.float(), weight.float()) - exact).abs().max())
    torch.backends.cuda.matmul.allow_tf32 = False
    fp32 = float((F.linear(x.float(), weight.float()) - exact).abs().max())
    error = float((parts.sum(0) - exact).abs().max())
    name = f"{shape.name} T={tokens}"
    title = f"{name} router logits (torch float32 {fp32:.1e}, TF32 {tf32:.1e}), largest error"
    verdict(title, error, max(2 * fp32, 2e-6))
    expected, experts = reference_route(exact[:, : shape.experts], shape.rules, weights.bias)
    found = route(parts, shape.rules, weights.bias)
    k = shape.rules.top_k
    changed = (found.experts[:, :k].sort().values != experts.sort().values).any(1)
    verdict(f"{name} tokens with other experts than in float64", float(changed.double().mean()), 2e-3)
    close = (found.weights[:, :k].double() - expected).abs()[~changed].max()
    verdict(f"{name} routing weights", float(close), 1e-5)


def check_sorting(shape: Shape, weights: MoEWeights, tokens: int) -> None:
    count = len(weights.down)
    experts = torch.randint(count, (tokens, shape.rules.slots), device=DEVICE, dtype=torch.int32)
    found = sort_by_expert(experts, count, 64)
    expected = experts.flatten().argsort(stable=True)
    verdict(f"{shape.name} T={tokens} pairs out of order", float((found.order != expected).double().mean()), 0)
    sizes = torch.bincount(experts.flatten(), minlength=count)
    blocks = (sizes + 63) // 64
    used = int(blocks.sum())
    owners = torch.repeat_interleave(torch.arange(count, device=DEVICE), blocks)
    inside = torch.arange(used, device=DEVICE) - (blocks.cumsum(0) - blocks)[owners]
    rows = torch.minimum(sizes[owners] - 64 * inside, torch.tensor(64, device=DEVICE))
    first = (sizes.cumsum(0) - sizes)[owners] + 64 * inside
    wrong = (found.blocks[:, :used] != torch.stack([owners, first, rows])).sum() + found.blocks[2, used:].sum()
    verdict(f"{shape.name} T={tokens} wrong entries of the block table", float(wrong), 0)


def check_layer(shape: Shape, weights: MoEWeights, tokens: int) -> None:
    x = inputs(shape, tokens, seed=8)
    routed = route(router_logits(x, weights.router), shape.rules, weights.bias)
    only = torch.linspace(0, tokens - 1, min(tokens, SAMPLE), device=DEVICE).long()
    expected = exact_experts(x, weights, routed, only)
    found = fused_moe(x, weights, shape.rules)
    error = float((found[only].float() - expected).norm() / expected.norm())
    verdict(f"{shape.name} T={tokens} layer", error, 1e-2)
    again = fused_moe(x, weights, shape.rules)
    verdict(f"{shape.name} T={tokens} two runs differ", float((found != again).double().mean()), 0)


def check_one_expert(shape: Shape, weights: MoEWeights, tokens: int) -> None:
    """Every token chooses the same experts."""
    x = inputs(shape, tokens, seed=9)
    experts = torch.arange(3, 3 + shape.rules.slots, device=DEVICE, dtype=torch.int32).repeat(tokens, 1)
    routed = Routed(torch.rand(tokens, shape.rules.slots, device=DEVICE), experts)
    only = torch.linspace(0, tokens - 1, min(tokens, SAMPLE), device=DEVICE).long()
    expected = exact_experts(x, weights, routed, only)
    found = run_experts(x, weights, routed)
    verdict(
        f"{shape.name} T={tokens} all tokens choose the same experts",
        float((found[only].float() - expected).norm() / expected.norm()), 1e-2,
    )  # fmt: skip


def check_graph(shape: Shape, weights: MoEWeights, tokens: int) -> None:
    x = inputs(shape, tokens, seed=10)
    graph, out = capture(lambda: fused_moe(x, weights, shape.rules))
    x.copy_(inputs(shape, tokens, seed=11))
    graph.replay()
    wrong = float((out != fused_moe(x, weights, shape.rules)).double().mean())
    verdict(f"{shape.name} T={tokens} graph with new tokens differs from a direct call", wrong, 0)


def check(shape: Shape, weights: MoEWeights, tokens: Iterable[int]) -> None:
    for count in tokens:
        for one in (check_routing, check_sorting, check_layer, check_one_expert, check_graph):
            attempt(f"{one.__name__} {shape.name} T={count}", partial(one, shape, weights, count))


# --- measuring ----------------------------------------------------------------------------------------------------


def each_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of the calls, which follow each other in a graph."""
    return graph_us(lambda: [call() for call in calls]) / len(calls)


def tile(text: str) -> TileConfig:
    """outputs x inputs, w: warps, s: stages, g: group, p: prefetch, t: TMA, n: not swapped."""
    sizes, *rest = text.split()
    outputs, columns = map(int, sizes.split("x"))
    fields = {one[0]: int(one[1:] or 1) for one in rest}
    return TileConfig(
        outputs, columns, fields.get("w", 4), fields["s"], fields.get("g", 1), "n" not in fields, "t" in fields,
        fields.get("p", 0),
    )  # fmt: skip


VECTORS = {
    "gate_up": [VectorConfig(8, 256, 4, 1), VectorConfig(8, 256, 4, 2), VectorConfig(4, 256, 2, 1),
                VectorConfig(4, 512, 4, 1), VectorConfig(16, 256, 8, 1), VectorConfig(2, 256, 1, 1)],
    "down": [VectorConfig(2, 256, 1, 4, True), VectorConfig(2, 256, 1), VectorConfig(1, 256, 1),
             VectorConfig(4, 256, 1), VectorConfig(2, 512, 1)],
}  # fmt: skip
FEW = {
    "gate_up": ["64x128 s3", "64x128 s3 t", "64x64 s4"],
    "down": ["128x64 s4", "128x64 s4 p8", "128x128 s3 t"],
}  # fmt: skip
MANY = {
    64: {
        "gate_up": ["128x64 s4 n", "128x64 s4 t n", "64x128 s3 n", "128x64 s4 w8 n", "128x64 s4 t n g4"],
        "down": ["128x64 s4 n", "128x64 s4 t n", "256x64 s4 w8 n", "128x64 s4 t", "128x64 s4 n g4"],
    },
    128: {
        "gate_up": ["128x64 s4 w8 g8 t n", "128x64 s4 w8 g8 t"],
        "down": ["256x64 s4 w8 g8 n", "256x64 s4 w8 g8 t n", "256x64 s4 w8 g4 t n"],
    },
}  # fmt: skip
ROWS = {8: (16,), 32: (16,), 128: (16,), 256: (16, 32, 64), 512: (32, 64), 1600: (64, 128), 8192: (128,)}
FEW_ROUTERS = [RouterConfig(16, 16, 128, 16), RouterConfig(16, 16, 64, 8), RouterConfig(16, 32, 64, 16)]
ROUTERS = [RouterConfig(64, 64, 64, splits) for splits in (1, 2, 4, 8)] + [
    RouterConfig(64, 128, 64, 2), RouterConfig(128, 64, 64, 2, 4, 2), RouterConfig(128, 64, 64, 1, 8),
    RouterConfig(128, 128, 64, 1, 8), RouterConfig(128, 128, 64, 2, 8),
]  # fmt: skip


class Case(NamedTuple):
    """One shape and number of tokens: several batches of inputs, routed."""

    shape: Shape
    weights: MoEWeights
    batches: list[Tensor]
    routed: list[Routed]

    @classmethod
    def make(cls, shape: Shape, weights: MoEWeights, tokens: int) -> Case:
        count = next(n for most, n in ((1, 12), (8, 6), (128, 4), (tokens, 2)) if tokens <= most)
        batches = [inputs(shape, tokens, seed) for seed in range(count)]
        routed = [route(router_logits(x, weights.router), shape.rules, weights.bias) for x in batches]
        return cls(shape, weights, batches, routed)

    @property
    def tokens(self) -> int:
        return len(self.batches[0])

    @property
    def touched(self) -> float:
        return statistics.mean(len(one.experts.unique()) for one in self.routed)

    def floor_us(self, share: float = 1.0) -> float:
        """`share`: 2/3 for gate and up, 1/3 for down."""
        read = self.touched * self.shape.expert_bytes / BANDWIDTH
        flop = self.tokens * self.shape.rules.slots * self.shape.expert_bytes / FLOPS
        return share * max(read, flop) * 1e6

    def tflops(self, us: float, share: float = 1.0) -> float:
        return share * self.tokens * self.shape.rules.slots * self.shape.expert_bytes / us / 1e6


def candidates(rows: int, part: str) -> list[TileConfig]:
    return [tile(text) for text in (MANY[rows] if rows >= 64 else FEW)[part]]


def short(config: TileConfig | VectorConfig) -> str:
    if isinstance(config, VectorConfig):
        return f"{config.outputs}x{config.inputs} w{config.warps} s{config.stages}{' p' if config.prefetch else ''}"
    flags = ("" if config.swapped else " n") + (" t" if config.tma else "")
    flags += (f" g{config.group}" if config.group > 1 else "") + (f" p{config.prefetch}" if config.prefetch else "")
    return f"{config.outputs}x{config.inputs} w{config.warps} s{config.stages}{flags}"


class Timed(NamedTuple):
    us: float
    config: TileConfig | VectorConfig


def time_part(case: Case, rows: int, part: str) -> Timed | None:
    """Each candidate of a GEMM, right or not, and its time; the fastest."""
    weights, found = case.weights, []
    share = 2 / 3 if part == "gate_up" else 1 / 3
    sorted_pairs = [sort_by_expert(r.experts, len(weights.down), rows) for r in case.routed]
    sets = list(zip(case.batches, case.routed, sorted_pairs, strict=True))
    x, routed, pairs = sets[0]
    wide = moe_gate_up(x, weights.gate_up, pairs, tile("64x64 s4"))
    other = tile("32x64 s3")
    good = wide if part == "gate_up" else moe_down(wide, weights.down, pairs, routed.weights, other)
    for config in candidates(rows, part):
        if part == "gate_up":
            calls = [partial(moe_gate_up, x, weights.gate_up, pairs, config) for x, _, pairs in sets]
        else:
            calls = [partial(moe_down, wide, weights.down, p, r.weights, config) for _, r, p in sets]
        us = attempt(f"{part} {rows} {short(config)}", partial(checked_us, calls, good))
        if us is not None:
            found.append(Timed(us, config))
    return report(case, f"{part} rows {rows}", found, share)


def checked_us(calls: Sequence[Callable[[], Tensor]], good: Tensor) -> float:
    made = calls[0]().float()
    error = float((made - good.float()).norm() / good.float().norm())
    if not error < 1e-2:
        raise ValueError(f"relative error {error}")
    return each_us(calls)


def report(case: Case, name: str, found: Sequence[Timed], share: float) -> Timed | None:
    best = min(found, key=lambda one: one.us, default=None)
    if best is None:
        return None
    floor = case.floor_us(share)
    print(
        f"  {name:16} floor {floor:7.1f}  best {best.us:7.1f} us = {floor / best.us:4.0%}"
        f" {case.tflops(best.us, share):4.0f} TFLOP/s |",
        *(f"{'*' if one is best else ''}{short(one.config)}: {one.us:.1f} |" for one in found),
        flush=True,
    )
    return best


def time_vectors(case: Case) -> MoELaunch | None:
    weights, gate_ups, downs = case.weights, [], []
    sets = list(zip(case.batches, case.routed, strict=True))
    for config in VECTORS["gate_up"]:
        calls = [partial(vector_gate_up, x, weights.gate_up, r, config) for x, r in sets]
        us = attempt(f"vector gate_up {short(config)}", partial(each_us, calls))
        gate_ups += [] if us is None else [Timed(us, config)]
    wide = vector_gate_up(case.batches[0], weights.gate_up, case.routed[0], VectorConfig(4, 512))
    for config in VECTORS["down"]:
        calls = [partial(vector_down, wide, weights.down, r, config) for r in case.routed]
        us = attempt(f"vector down {short(config)}", partial(each_us, calls))
        downs += [] if us is None else [Timed(us, config)]
    first = report(case, "vector gate_up", gate_ups, 2 / 3)
    second = report(case, "vector down", downs, 1 / 3)
    return MoELaunch(0, first.config, second.config) if first and second else None


def routers(tokens: int, experts: int, hidden: int) -> Iterable[RouterConfig]:
    others = FEW_ROUTERS if tokens <= 16 else ROUTERS if tokens > 512 else []
    return dict.fromkeys([choose_router(tokens, experts, hidden, 132), *others])


def time_small(case: Case) -> None:
    """The launches around the GEMMs."""
    shape, weights, x, tokens = case.shape, case.weights, case.batches[0], case.tokens
    hidden, experts = shape.hidden, weights.router.shape[1]
    for config in routers(tokens, experts, hidden):
        us = attempt(f"router {config}", partial(each_us, [partial(router_logits, x, weights.router, config)] * 8))
        print(f"  router {'x'.join(map(str, config))}: {us or 0:.1f} us", end="")
    logits, routed = router_logits(x, weights.router), case.routed[0]
    linear = partial(F.linear, x.float(), weights.router.float().sum(0))
    print(f"  torch float32 linear: {each_us([linear] * 8):.1f}", end="")
    print(f"  route: {each_us([partial(route, logits, shape.rules, weights.bias)] * 8):.1f}", end="")
    if tokens > 1:
        rows = choose(tokens, shape.rules.slots, len(weights.down), BF16, 227 << 10, tma=True).rows or 16
        sort = partial(sort_by_expert, routed.experts, len(weights.down), rows)
        made = torch.empty(tokens * shape.rules.slots, hidden, device=DEVICE, dtype=BF16)
        floor = made.nbytes * (1 + 1 / shape.rules.slots) / BANDWIDTH * 1e6
        summed = each_us([partial(combine, made, shape.rules.slots)] * 4)
        print(f"  sort: {each_us([sort] * 8):.1f}  combine: {summed:.1f} (floor {floor:.1f})", end="")
    print(flush=True)


def time_grouped(case: Case) -> None:
    """PyTorch's grouped GEMMs, on rows that are gathered already and without activation: what a library reaches."""
    weights, calls = case.weights, []
    pairs = case.tokens * case.shape.rules.slots
    x = torch.randn(pairs, case.shape.hidden, device=DEVICE, dtype=BF16)
    wide = torch.randn(pairs, case.shape.width, device=DEVICE, dtype=BF16)
    for routed in case.routed:
        ends = torch.bincount(routed.experts.flatten(), minlength=len(weights.down)).cumsum(0).int()
        calls.append((ends, weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)))
    first = each_us([partial(torch._grouped_mm, x, gate_up, offs=ends) for ends, gate_up, _ in calls])
    second = each_us([partial(torch._grouped_mm, wide, down, offs=ends) for ends, _, down in calls])
    print(
        f"  torch._grouped_mm gate_up {first:.1f} us {case.tflops(first, 2 / 3):.0f} TFLOP/s,"
        f" down {second:.1f} us {case.tflops(second, 1 / 3):.0f} TFLOP/s",
        flush=True,
    )


def time_layers(case: Case, launches: dict[str, MoELaunch]) -> None:
    floor = case.floor_us()
    for name, launch in launches.items():
        calls = [partial(fused_moe, x, case.weights, case.shape.rules, launch=launch) for x in case.batches]
        us = attempt(f"layer {name}", partial(each_us, calls))
        if us is not None:
            print(
                f"  layer, {name:11} {us:7.1f} us, floor {floor:7.1f} = {floor / us:4.0%}, {case.tflops(us):4.0f}"
                f" TFLOP/s: rows {launch.rows}, {short(launch.gate_up)} | {short(launch.down)}",
                flush=True,
            )


def measure(shape: Shape, weights: MoEWeights, tokens: int) -> None:
    case = Case.make(shape, weights, tokens)
    print(f"{shape.name}, {tokens} tokens, {case.touched:.0f} experts touched", flush=True)
    shared, tma = shared_memory(DEVICE), supports_tma(weights)
    chosen = choose(tokens, shape.rules.slots, len(weights.down), BF16, shared, tma=tma)
    launches = {"chosen": chosen}
    attempt("small launches", partial(time_small, case))
    attempt("torch._grouped_mm", partial(time_grouped, case))
    if chosen.rows == 0:
        best = time_vectors(case)
        launches |= {"best": best} if best else {}
        assert isinstance(chosen.down, VectorConfig)
        launches["no prefetch"] = chosen._replace(down=chosen.down._replace(prefetch=False))
        tiles = MoELaunch(16, tile("64x128 s3"), tile("128x64 s4"))
        launches |= {"tiles": tiles} if tokens > 1 else {}
    elif chosen.rows == 16:
        assert isinstance(chosen.down, TileConfig)
        launches["prefetch"] = chosen._replace(down=chosen.down._replace(prefetch=8))
    for rows in ROWS.get(tokens, ()):
        first, second = time_part(case, rows, "gate_up"), time_part(case, rows, "down")
        if first and second:
            launches[f"rows {rows}"] = MoELaunch(rows, first.config, second.config)
    time_layers(case, launches)


# --- all of it ----------------------------------------------------------------------------------------------------


Jobs = dict[object, Callable[[], object]]


def gemm_jobs(shape: Shape, weights: MoEWeights, tokens: Iterable[int]) -> Jobs:
    jobs: Jobs = {}
    x = inputs(shape, 40)
    routed = route(router_logits(x, weights.router), shape.rules, weights.bias)
    for rows in {rows for count in tokens for rows in ROWS.get(count, ())}:
        pairs = sort_by_expert(routed.experts, len(weights.down), rows)
        wide = torch.randn(len(pairs.order), shape.width, device=DEVICE, dtype=BF16)
        for config in candidates(rows, "gate_up"):
            jobs[rows, config] = partial(moe_gate_up, x, weights.gate_up, pairs, config)
        for config in candidates(rows, "down"):
            jobs[rows, config, shape.width] = partial(moe_down, wide, weights.down, pairs, routed.weights, config)
    few = Routed(routed.weights[:1], routed.experts[:1])
    wide = torch.randn(shape.rules.slots, shape.width, device=DEVICE, dtype=BF16)
    for config in VECTORS["gate_up"]:
        jobs[shape.name, config, 0] = partial(vector_gate_up, x[:1], weights.gate_up, few, config)
    for config in VECTORS["down"]:
        jobs[shape.name, config, 1] = partial(vector_down, wide, weights.down, few, config)
    return jobs


def small_jobs(shape: Shape, weights: MoEWeights, tokens: Iterable[int]) -> Jobs:
    jobs: Jobs = {}
    experts = len(weights.down)
    for count in tokens:
        x = inputs(shape, count)
        for config in routers(count, weights.router.shape[1], shape.hidden):
            jobs[shape.name, config] = partial(router_logits, x, weights.router, config)
        chosen = torch.randint(experts, (count, shape.rules.slots), device=DEVICE, dtype=torch.int32)
        for rows in ROWS.get(count, ()):
            jobs[shape.name, count, rows] = partial(sort_by_expert, chosen, experts, rows)
    return jobs


def compile_all(shapes: Sequence[tuple[Shape, MoEWeights]], tokens: Sequence[int]) -> None:
    """Each candidate once; most of a compilation runs outside Python's lock, so threads do several at a time."""
    start = time.perf_counter()
    jobs: Jobs = {}
    for shape, weights in shapes:
        jobs |= small_jobs(shape, weights, tokens) | gemm_jobs(shape, weights, tokens)

    def once(job: tuple[object, Callable[[], object]]) -> None:
        attempt(f"compile {job[0]}", job[1])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(once, jobs.items()))
    torch.cuda.synchronize()
    print(f"{len(jobs)} launches compiled in {time.perf_counter() - start:.1f} s", flush=True)


def main(arguments: Sequence[str]) -> None:
    start = time.perf_counter()
    tokens = [int(one) for one in arguments] or list(TOKENS)
    torch.manual_seed(0)
    with torch.inference_mode():
        timed = [(shape, make_weights(shape)) for shape in (QWEN3_VL, QWEN3_5)]
        compile_all(timed, tokens)
        for shape, weights in timed:
            check(shape, weights, (1, 3, 37, 130, 1600))
        print(f"{time.perf_counter() - start:.0f} s so far", flush=True)
        for count in tokens:
            for shape, weights in timed:
                attempt(f"{shape.name} {count}", partial(measure, shape, weights, count))
        print(f"{time.perf_counter() - start:.0f} s so far", flush=True)
        del timed
        torch.cuda.empty_cache()
        for shape in (DEEPSEEK, DEEPSEEK_SMALL):
            check(shape, make_weights(shape), (1, 40, 1601))
    print(f"done in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
