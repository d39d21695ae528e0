"""Experts: whole layers in bfloat16 and INT4, and the launches around their GEMMs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.gemm import int4_weight
from benchmarks.kernels.harness import BYTES_PER_S, DEVICE, DTYPE, FLOPS, Call, Case, compute_us, random, read_us
from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.launch.device import shared_memory
from saccade.kernels.moe.combine import combine
from saccade.kernels.moe.fused_moe import MoEWeights, choose, fused_moe, run_experts, supports_tma
from saccade.kernels.moe.router_gemm import router_logits, split_router
from saccade.kernels.moe.sorting import sort_by_expert
from saccade.kernels.moe.topk_routing import Routed, RoutingRules, route
from saccade.kernels.ops.reference import unpacked_int4

SAMPLE = 48  # tokens that are compared


class Shape(NamedTuple):
    """A model's experts; `rules.shared` of them are run for every token."""

    name: str
    hidden: int
    width: int
    experts: int
    rules: RoutingRules
    has_bias: bool = False

    @property
    def parameters(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.width


QWEN3_VL = Shape("Qwen3-VL-30B-A3B", 2048, 768, 128, RoutingRules(8, normalise=True))
QWEN3_5 = Shape("Qwen3.5-35B-A3B", 2048, 512, 256, RoutingRules(8, normalise=True, shared=1, shared_gate=True))
DEEPSEEK = Shape("DeepSeek-VL2", 2560, 1536, 72, RoutingRules(6, True, True, 2.5, 8, 3, shared=2), True)
SHAPES = (QWEN3_VL, QWEN3_5, DEEPSEEK)
INT4_SHAPES = (QWEN3_VL, QWEN3_5._replace(rules=RoutingRules(8, normalise=True)))
TOKENS = (1, 4, 8, 32, 128, 256, 512, 1600, 8192)
INT4_TOKENS = (1, 8, 32, 1600)


class Batches(NamedTuple):
    """Several batches of tokens, which go to other experts, so that weights come from memory."""

    shape: Shape
    inputs: list[Tensor]
    routed: list[Routed]

    @classmethod
    def of(cls, shape: Shape, weights: MoEWeights, tokens: int) -> Batches:
        count = next(number for most, number in ((1, 12), (8, 6), (128, 4), (tokens, 2)) if tokens <= most)
        inputs = [random(tokens, shape.hidden) for _ in range(count)]
        routed = [route(router_logits(x, weights.router), shape.rules, weights.bias) for x in inputs]
        return cls(shape, inputs, routed)

    @property
    def touched(self) -> float:
        """Experts that a batch goes to, on average."""
        return sum(len(one.experts.unique()) for one in self.routed) / len(self.routed)

    def floor_us(self, expert_bytes: float) -> float:
        read = self.touched * expert_bytes / BYTES_PER_S
        flop = 2 * len(self.inputs[0]) * self.shape.rules.slots * self.shape.parameters / FLOPS
        return max(read, flop) * 1e6


def make_weights(shape: Shape) -> MoEWeights:
    count = shape.experts + shape.rules.shared
    router = random(shape.experts + int(shape.rules.shared_gate), shape.hidden, dtype=torch.float32)
    bias = random(shape.experts, dtype=torch.float32) / 10 if shape.has_bias else None
    gate_up = torch.randn(count, 2 * shape.width, shape.hidden, device=DEVICE, dtype=DTYPE)
    down = torch.randn(count, shape.hidden, shape.width, device=DEVICE, dtype=DTYPE)
    parts = split_router(router * shape.hidden**-0.5, DTYPE)
    return MoEWeights(parts, bias, gate_up.mul_(shape.hidden**-0.5), down.mul_(shape.width**-0.5))


def exact_experts(x: Tensor, gate_up: Tensor, down: Tensor, routed: Routed) -> Tensor:
    """Of a sample of the tokens, in float32."""
    tokens = sample(x)
    rows = x[tokens].float()
    shares = routed.weights[tokens]
    experts = routed.experts[tokens]
    out = torch.zeros_like(rows)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(rows[token], gate_up[expert].float()).chunk(2, dim=-1)
        narrow = F.linear(F.silu(gate) * up, down[expert].float())
        out.index_add_(0, token, narrow * shares[token, slot, None])
    return out


def sample(x: Tensor) -> Tensor:
    return torch.linspace(0, len(x) - 1, min(len(x), SAMPLE), device=DEVICE).long()


def read_sample(out: Tensor) -> Tensor:
    return out[sample(out)]


def layers(shapes: Iterable[Shape] = SHAPES, tokens: Sequence[int] = TOKENS) -> Iterator[Case]:
    """Routing and experts. Beside them PyTorch's grouped GEMMs, of rows that are gathered already."""
    for shape in shapes:
        weights = make_weights(shape)
        for count in tokens:
            batches = Batches.of(shape, weights, count)
            ours: dict[str, list[Call]] = {
                "layer": [partial(fused_moe, x, weights, shape.rules) for x in batches.inputs],
                "experts": [
                    partial(run_experts, x, weights, routed)
                    for x, routed in zip(batches.inputs, batches.routed, strict=True)
                ],
            }
            expected = exact_experts(batches.inputs[0], weights.gate_up, weights.down, batches.routed[0])
            floor = batches.floor_us(2 * shape.parameters)
            beside = _grouped(batches, weights)
            name = f"{shape.name}, {count} tokens, {batches.touched:.0f} experts"
            yield Case(name, ours, floor, expected, beside, read=read_sample)


def _grouped(batches: Batches, weights: MoEWeights) -> dict[str, list[Call]]:
    """Both GEMMs apart, without activation: what a library reaches."""
    pairs = len(batches.inputs[0]) * batches.shape.rules.slots
    x = random(pairs, batches.shape.hidden)
    wide = random(pairs, batches.shape.width)
    ends = [
        torch.bincount(routed.experts.flatten(), minlength=len(weights.down)).cumsum(0).int()
        for routed in batches.routed
    ]
    gate_up = weights.gate_up.transpose(1, 2)
    down = weights.down.transpose(1, 2)
    return {
        "torch gate_up": [partial(torch._grouped_mm, x, gate_up, offs=offsets) for offsets in ends],
        "torch down": [partial(torch._grouped_mm, wide, down, offs=offsets) for offsets in ends],
    }


def parts(shapes: Iterable[Shape] = SHAPES, tokens: Sequence[int] = TOKENS) -> Iterator[Case]:
    """The launches around the GEMMs."""
    for shape in shapes:
        weights = make_weights(shape)
        for count in tokens:
            yield from _parts(shape, weights, random(count, shape.hidden))


def _parts(shape: Shape, weights: MoEWeights, x: Tensor) -> Iterator[Case]:
    count = len(x)
    slots = shape.rules.slots
    experts = len(weights.down)
    router = weights.router.float().sum(0)
    logits = router_logits(x, weights.router)
    name = f"{shape.name}, {count} tokens"
    gemm: list[Call] = [partial(router_logits, x, weights.router)] * 8
    beside = {"torch float32": [partial(F.linear, x.float(), router)] * 8}
    floor = max(read_us(weights.router.nbytes), compute_us(2 * count * weights.router.numel()))
    exact = F.linear(x.double(), router.double())
    yield Case(f"router, {name}", {"triton": gemm}, floor, exact, beside, 1e-4, partial(torch.sum, dim=0))
    choose_experts: list[Call] = [partial(route, logits, shape.rules, weights.bias)] * 8
    yield Case(f"route, {name}", {"triton": choose_experts}, read_us(logits.nbytes))
    if count == 1:
        return
    routed = route(logits, shape.rules, weights.bias)
    rows = choose(count, slots, experts, DTYPE, shared_memory(DEVICE), tma=supports_tma(weights)).rows or 16
    sort: list[Call] = [partial(sort_by_expert, routed.experts, experts, rows)] * 8
    order = routed.experts.flatten().argsort(stable=True)
    floor = read_us(2 * routed.experts.nbytes)
    yield Case(f"sort, {name}", {"triton": sort}, floor, order, limit=0, read=lambda pairs: pairs.order)
    outs = random(count * slots, shape.hidden)
    total = outs.view(count, slots, -1).float().sum(1)
    calls: list[Call] = [partial(combine, outs, slots)] * 4
    yield Case(f"combine, {name}", {"triton": calls}, read_us(outs.nbytes * (1 + 1 / slots)), total)


def int4(shapes: Iterable[Shape] = INT4_SHAPES, tokens: Sequence[int] = INT4_TOKENS) -> Iterator[Case]:
    for shape in shapes:
        weights = make_weights(shape)
        gate_up = int4_weight(2 * shape.width, shape.hidden, 128, True, [shape.experts])
        down = int4_weight(shape.hidden, shape.width, 128, True, [shape.experts])
        packs, scales, zeros = zip(gate_up, down, strict=True)
        packed = MoEWeights(weights.router, weights.bias, *packs, *scales, *zeros)
        plain = [_dequantized(weight) for weight in (gate_up, down)]
        size = sum(part.nbytes for weight in (gate_up, down) for part in weight if part is not None)
        for count in tokens:
            batches = Batches.of(shape, weights, count)
            calls = [
                partial(run_experts, x, packed, routed)
                for x, routed in zip(batches.inputs, batches.routed, strict=True)
            ]
            expected = exact_experts(batches.inputs[0], *plain, batches.routed[0])
            floor = batches.floor_us(size / shape.experts)
            name = f"int4 {shape.name}, {count} tokens, {batches.touched:.0f} experts"
            yield Case(name, {"experts": calls}, floor, expected, read=read_sample)


def _dequantized(weight: Int4Weight) -> Tensor:
    experts = zip(weight.weight, weight.scales, weight.zeros, strict=True)  # type: ignore[arg-type]
    return torch.stack([unpacked_int4(Int4Weight(*expert)).to(DTYPE) for expert in experts])
