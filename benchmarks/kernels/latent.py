"""Latent attention (MLA) at DeepSeek-VL2's shapes: store, decode, and prefill over latents or over expanded keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.harness import DEVICE, DTYPE, Call, Case, compute_us, copies, ints, random, read_us
from saccade.kernels.attention.mla_absorbed import mla_decode, mla_prefill, prefill_launch, tile_tokens
from saccade.kernels.attention.mla_expanded import (
    GATHERED,
    MLADims,
    expand_context,
    mla_expanded_prefill,
    tile_rows,
)
from saccade.kernels.attention.mla_store import mla_rope_store
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.layers.mla import rotate_pairs
from saccade.models.layers.rotary_embedding import cos_sin
from saccade.models.layers.torch_attention import AttentionBatch, reference_attention

BLOCK = 16
DIMS = MLADims(rank=512, nope=128, rope=64, value=128)


class Decode(NamedTuple):
    heads: int
    contexts: Sequence[int]
    dims: MLADims = DIMS


class Prefill(NamedTuple):
    heads: int
    lengths: Sequence[int]  # new tokens of each request
    contexts: Sequence[int]  # with them
    dims: MLADims = DIMS


DECODES = (
    *(
        Decode(heads, [context] * requests)
        for heads in (16, 32) for requests in (1, 32, 128) for context in (1024, 8192)
    ),
    Decode(16, [4000 if i % 4 == 1 else 400 for i in range(64)]),
)  # fmt: skip
PREFILLS = (
    Prefill(16, [1600], [1600]),
    Prefill(16, [8192], [8192]),
    Prefill(32, [1600], [1600]),
    Prefill(16, [64], [4064]),
    Prefill(16, [512], [4512]),
    Prefill(10, [37, 1, 300], [37, 900, 1500]),  # a number of heads that is no power of two
)
STORES = tuple((heads, tokens) for heads in (16, 32) for tokens in (1, 32, 128, 1600))


class Latents(NamedTuple):
    """Caches of several layers, and contexts with blocks anywhere in them."""

    layers: Tensor  # [layers, slots, 1, rank + rope]
    tables: Tensor
    contexts: Sequence[int]
    dims: MLADims

    @classmethod
    def of(cls, contexts: Sequence[int], dims: MLADims) -> Latents:
        blocks = -(-max(contexts) // BLOCK)
        count = blocks * len(contexts)
        dim = dims.rank + dims.rope
        tables = torch.randperm(count, device=DEVICE).int().view(len(contexts), blocks)
        layers = copies(2 * dim * sum(contexts), 48)
        return cls(random(layers, count * BLOCK, 1, dim), tables, contexts, dims)

    @property
    def scale(self) -> float:
        return float((self.dims.nope + self.dims.rope) ** -0.5)

    def expected(self, queries: Tensor, lengths: Sequence[int]) -> Tensor:
        batch = AttentionBatch(list(lengths), list(self.contexts), self.tables.long(), ints([]), BLOCK)
        cache = self.layers[0].float()
        return reference_attention(queries.float(), cache, cache, batch, self.scale)[..., : self.dims.rank]


def decode(works: Iterable[Decode] = DECODES) -> Iterator[Case]:
    for work in works:
        requests = len(work.contexts)
        dim = work.dims.rank + work.dims.rope
        latents = Latents.of(work.contexts, work.dims)
        queries = random(requests, work.heads, dim)
        arguments = (latents.tables, ints(work.contexts), work.dims.rank, BLOCK, latents.scale)
        ours = {"triton": [partial(mla_decode, queries, cache, *arguments) for cache in latents.layers]}
        name = f"latent decode {work.heads} heads, {requests} x {max(work.contexts)}"
        floor = read_us(2 * dim * sum(work.contexts))
        yield Case(name, ours, floor, latents.expected(queries, [1] * requests))


def prefill(works: Iterable[Prefill] = PREFILLS) -> Iterator[Case]:
    for work in works:
        latents = Latents.of(work.contexts, work.dims)
        yield _absorbed(work, latents)
        yield _expanded(work, latents)


def _absorbed(work: Prefill, latents: Latents) -> Case:
    heads = work.heads
    dims = work.dims
    queries = random(sum(work.lengths), heads, dims.rank + dims.rope)
    rows = tile_tokens(heads, prefill_launch(latents.layers))
    tiles = Tiles.of(work.lengths, rows, DEVICE, seq_lens=work.contexts)
    arguments = (latents.tables, ints(work.contexts), tiles, dims.rank, BLOCK, latents.scale)
    ours = {"absorbed": [partial(mla_prefill, queries, cache, *arguments) for cache in latents.layers]}
    floor = compute_us(2 * _pairs(work) * (2 * dims.rank + dims.rope))
    return Case(_name(work), ours, floor, latents.expected(queries, work.lengths))


def _expanded(work: Prefill, latents: Latents) -> Case:
    """Attention, and beside it what gathers and expands its keys."""
    heads = work.heads
    dims = work.dims
    weight = random(heads * (dims.nope + dims.value), dims.rank) / 16
    q = random(sum(work.lengths), heads, dims.nope + dims.rope)
    contexts = Tiles.of(work.contexts, GATHERED, DEVICE)
    arguments = (latents.tables, contexts, sum(work.contexts), weight, dims, BLOCK)
    context = expand_context(latents.layers[0], *arguments)
    tiles = Tiles.of(work.lengths, tile_rows(q, *q.shape[:2]), DEVICE, seq_lens=work.contexts)
    ours: dict[str, list[Call]] = {
        "expanded": [partial(mla_expanded_prefill, q, context, tiles, dims, latents.scale)] * 4
    }
    beside: dict[str, list[Call]] = {
        "to expand": [partial(expand_context, cache, *arguments) for cache in latents.layers]
    }
    by_head = weight.view(heads, dims.nope + dims.value, dims.rank).float()
    absorbed = torch.einsum("thd,hdr->thr", q[..., : dims.nope].float(), by_head[:, : dims.nope])
    mixed = latents.expected(torch.cat((absorbed, q[..., dims.nope :].float()), dim=-1), work.lengths)
    expected = torch.einsum("thr,hdr->thd", mixed, by_head[:, dims.nope :])
    floor = compute_us(2 * _pairs(work) * (dims.nope + dims.rope + dims.value))
    return Case(_name(work), ours, floor, expected, beside)


def _pairs(work: Prefill) -> float:
    """Of a query and a key, for all heads."""
    each = zip(work.lengths, work.contexts, strict=True)
    return work.heads * sum(length * (context - length / 2) for length, context in each)


def _name(work: Prefill) -> str:
    return f"latent prefill {work.heads} heads, {work.lengths} of {work.contexts}"


def store(works: Iterable[tuple[int, int]] = STORES, dims: MLADims = DIMS) -> Iterator[Case]:
    """Turned queries and stored latents. Beside it, the GEMMs by head before and after attention."""
    for heads, tokens in works:
        dim = dims.rank + dims.rope
        width = dims.nope + dims.rope
        projected = random(tokens, heads * width + dim)
        q = projected[:, : heads * width].view(tokens, heads, width)
        latents = projected[:, heads * width :]
        cos, sin = cos_sin(torch.rand(tokens, 1, dims.rope // 2, device=DEVICE) * 50, DTYPE)
        norm = random(dims.rank)
        cache = random(tokens + BLOCK, 1, dim)
        queries = random(tokens, heads, dim)
        arguments = (norm, 1e-6, cache, ints(range(tokens)), queries[..., dims.rank :])
        turn = partial(mla_rope_store, q[..., dims.nope :], latents, cos, sin, *arguments)
        ours: dict[str, list[Call]] = {"triton": [partial(_turned, turn, queries[..., dims.rank :])] * 8}
        expected = rotate_pairs(q[..., dims.nope :].float().contiguous(), cos.float(), sin.float())
        beside = _by_head(q, queries, dims)
        floor = read_us(2 * tokens * (2 * dim + 2 * heads * dims.rope))
        yield Case(f"latent store {heads} heads, {tokens} tokens", ours, floor, expected, beside)


def _turned(turn: Call, queries: Tensor) -> Tensor:
    turn()
    return queries


def _by_head(q: Tensor, queries: Tensor, dims: MLADims) -> dict[str, list[Call]]:
    """Both batched GEMMs, in the layouts that a layer has."""
    tokens, heads, _ = q.shape
    size = heads * (dims.nope + dims.value) * dims.rank
    weights = random(copies(2 * size, 24), heads, dims.nope + dims.value, dims.rank)
    mixed = random(tokens, heads, dims.rank)
    values = random(tokens, heads, dims.value)
    keys = q[..., : dims.nope].transpose(0, 1)
    absorbed = queries[..., : dims.rank].transpose(0, 1)
    return {
        "torch absorb": [partial(torch.bmm, keys, weight[:, : dims.nope], out=absorbed) for weight in weights],
        "torch values": [
            partial(torch.bmm, mixed.transpose(0, 1), weight[:, dims.nope :].mT, out=values.transpose(0, 1))
            for weight in weights
        ],
    }
