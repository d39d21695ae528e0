"""Gated delta nets at Qwen3.5's shapes: decode and prefill, against the layer in PyTorch with float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.harness import DEVICE, DTYPE, Case, compute_us, copies, ints, random, read_us
from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.kernels.gdn.decode import allocate_counters, gdn_decode
from saccade.kernels.gdn.layout import GDNShape, GDNStates, GDNWeights
from saccade.kernels.gdn.prefill import GDNPrefill, PrefillConfig, PrefillWorkspace
from saccade.kernels.gdn.prefill_plan import ChunkPlan, max_chunks, plan_chunks
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.state_dict import Parameters

QWEN_9B = GDNShape(16, 32, 128, 128, 4)
QWEN_27B = GDNShape(16, 48, 128, 128, 4)


class Decode(NamedTuple):
    tokens: int
    shape: GDNShape = QWEN_9B


class Prefill(NamedTuple):
    lengths: Sequence[int]
    capacity: int  # pieces that the plan has room for
    shape: GDNShape = QWEN_9B


DECODES = (Decode(1), Decode(8), Decode(32), Decode(128), Decode(32, QWEN_27B))
PREFILLS = (
    Prefill([1600], 4),
    Prefill([1600], 64),
    Prefill([64], 4),
    Prefill([400] * 4, 8),
    Prefill([8192], 8),
    Prefill([1600], 4, QWEN_27B),
)


class Layer:
    """Random weights, states and inputs. Decays and betas are as wide as in a trained model."""

    def __init__(self, shape: GDNShape, rows: int, tokens: int) -> None:
        self.shape = shape
        heads = shape.value_heads
        decay = torch.empty(heads, device=DEVICE).uniform_(0.5, 16).log().to(DTYPE)
        norm = 1 + 0.1 * random(shape.value_dim)
        self.weights = GDNWeights(random(shape.channels, 1, shape.kernel) / 2, decay, random(heads) - 3, norm, 1e-6)
        past = random(rows, shape.kernel - 1, shape.channels).transpose(1, 2)
        memory = random(rows, heads, shape.key_dim, shape.value_dim, dtype=torch.float32) / 4
        self.states = GDNStates(past, memory)
        self.projected = random(tokens, shape.width)

    def in_float32(self) -> Layer:
        """The same numbers, and states of its own."""
        twin = Layer.__new__(Layer)
        twin.shape = self.shape
        twin.weights = GDNWeights(*(weight.float() for weight in self.weights[:4]), eps=self.weights.eps)
        past = self.states.conv.transpose(1, 2).to(torch.float32, copy=True).transpose(1, 2)
        twin.states = GDNStates(past, self.states.recurrent.clone())
        twin.projected = self.projected.float()
        return twin

    def reference(self, lengths: Sequence[int], rows: Sequence[int]) -> Tensor:
        """By the layer in PyTorch. Windows of one token run at once."""
        text = TextConfig(8, 8, 1, 1, 1, 8, 8, 8, self.weights.eps, 1e4, None, {}, False, "qwen3_5")
        params = Parameters(self.projected.dtype, DEVICE)
        layer: Any = GatedDeltaNet(params, text, LinearConfig((0,), *self.shape))
        layer.conv, layer.decay, layer.decay_bias, layer.norm.weight = self.weights[:4]
        layer.inputs = layer.out = lambda x: x
        windows = torch.arange(sum(lengths), device=DEVICE).split(list(lengths))
        places = torch.tensor(rows, device=DEVICE)
        groups = [WindowGroup(window[None], row[None]) for window, row in zip(windows, places, strict=True)]
        if max(lengths) == 1:
            groups = [WindowGroup(torch.stack(windows), places)]
        states = States(self.states.conv[None], self.states.recurrent[None], groups)
        out: Tensor = layer(self.projected, states, 0)
        return out


def decode(works: Iterable[Decode] = DECODES) -> Iterator[Case]:
    for tokens, shape in works:
        state = 8 * tokens * shape.value_heads * shape.key_dim * shape.value_dim
        layers = [Layer(shape, tokens, tokens) for _ in range(copies(state / 2, 32))]
        rows = torch.randperm(tokens).tolist()
        expected = layers[0].in_float32().reference([1] * tokens, rows)
        counters = allocate_counters(tokens, shape, DEVICE)
        places = ints(rows)
        calls = [partial(gdn_decode, x.projected, places, shape, x.weights, x.states, counters) for x in layers]
        vectors = 2 * (2 * (shape.kernel - 1) * shape.channels + shape.width + shape.value_heads * shape.value_dim)
        name = f"delta decode {tokens}, {shape.value_heads} heads"
        yield Case(name, {"triton": calls}, read_us(state + tokens * vectors), expected, limit=4e-3)


def prefill(works: Iterable[Prefill] = PREFILLS) -> Iterator[Case]:
    for lengths, capacity, shape in works:
        tokens = sum(lengths)
        rows = range(len(lengths))
        layers = [Layer(shape, len(lengths) + 1, tokens) for _ in range(copies(2 * tokens * shape.width, 16))]
        expected = layers[0].in_float32().reference(lengths, rows)
        plan = plan_of(lengths, capacity)
        workspace = PrefillWorkspace.allocate(max_chunks(tokens, capacity), shape, DTYPE, DEVICE)
        out = layers[0].projected.new_empty(tokens, shape.value_heads * shape.value_dim)
        arguments = (workspace, PrefillConfig())
        calls = [partial(GDNPrefill(x.projected, plan, shape, x.weights, x.states, *arguments), out) for x in layers]
        name = f"delta prefill {tokens} in {len(lengths)}, {shape.value_heads} heads, for {capacity}"
        yield Case(name, {"triton": calls}, prefill_floor(shape, tokens), expected)


def prefill_floor(shape: GDNShape, tokens: int) -> float:
    heads = shape.value_heads
    size = shape.value_dim * shape.key_dim
    moved = 2 * tokens * (shape.width + heads * shape.value_dim) + 8 * heads * size
    multiplied = 2 * tokens * heads * (3 * size + 64 * (2 * shape.key_dim + 2 * shape.value_dim))
    return max(read_us(moved), compute_us(multiplied))


def plan_of(lengths: Sequence[int], capacity: int) -> ChunkPlan:
    """Each window has the state row of its number; no state is kept beside it."""
    unused = capacity - len(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows = ints([*range(len(lengths)), *[-1] * unused])
    return plan_chunks(ints(starts + starts[-1:] * unused), rows, ints([-1] * capacity), sum(lengths))
