"""Attention over paged caches (decode and prefill), and inside images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.kernels.harness import DEVICE, DTYPE, Call, Case, compute_us, copies, ints, random, read_us
from saccade.kernels.attention.decode import DecodeAttention
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.attention.prefill_triton import choose_rows, paged_prefill
from saccade.kernels.attention.vit_triton import TILE_ROWS, packed_vit
from saccade.kernels.launch.device import Heads, is_hopper, num_sms
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.layers.torch_attention import AttentionBatch, as_stored, packed_attention, reference_attention

BLOCK = 16
OUTGROWN = 300.0  # a key so much larger is preferred by hundreds of powers of two
FP8 = torch.float8_e4m3fn
FP8_SCALE = 0.05
QWEN2_2B = Heads(12, 2, 128)
QWEN2_7B = Heads(28, 4, 128)
QWEN3_8B = Heads(32, 8, 128)
QWEN3_5 = Heads(16, 4, 256)
QWEN3_5_MOE = Heads(16, 2, 256)


class Decode(NamedTuple):
    """One new token for each request."""

    name: str
    heads: Heads
    contexts: Sequence[int]
    rotary: int = 128  # dimensions that rotate
    is_fp8: bool = False  # the cache


class Prefill(NamedTuple):
    """New tokens of each request, and its context with them."""

    name: str
    heads: Heads
    lengths: Sequence[int]
    contexts: Sequence[int]
    grown: float = 1  # by how much two keys of each request are larger


class Vit(NamedTuple):
    """Patches of each image."""

    lengths: Sequence[int]
    head_dim: int = 80
    heads: int = 16
    grown: float = 1  # by how much three keys of the first image are larger


def _unequal(requests: int) -> list[int]:
    return [3356 if i % 4 == 1 else 300 for i in range(requests)]


DECODES = (
    *(Decode("Qwen2-VL-2B", QWEN2_2B, [1024] * requests) for requests in (1, 8, 32, 64, 128)),
    *(Decode("Qwen2-VL-2B unequal", QWEN2_2B, _unequal(requests)) for requests in (32, 128)),
    Decode("Qwen2.5-VL-7B", QWEN2_7B, [1024] * 128),
    Decode("Qwen2.5-VL-7B unequal", QWEN2_7B, _unequal(128)),
    *(Decode("Qwen3.5", QWEN3_5, [context] * requests, 64) for requests in (1, 32, 128) for context in (1024, 8192)),
    Decode("Qwen3.5 MoE", QWEN3_5_MOE, [1024] * 32, 64),
    *(Decode("Qwen3-VL-8B", QWEN3_8B, [8192] * 128, is_fp8=is_fp8) for is_fp8 in (False, True)),
)
PREFILLS = (
    *(Prefill("Qwen2-VL-2B", QWEN2_2B, [tokens], [tokens]) for tokens in (512, 1216, 1600, 2700, 8192)),
    *(Prefill("Qwen2-VL-2B", QWEN2_2B, [tokens], [tokens + 21000]) for tokens in (256, 1200, 2700)),
    Prefill("Qwen2-VL-2B", QWEN2_2B, [512], [4096]),
    Prefill("Qwen2-VL-2B", QWEN2_2B, [1600, 77, 512, 300], [1600, 77, 4096, 5000]),
    *(Prefill("Qwen3.5", QWEN3_5, [tokens], [tokens]) for tokens in (1600, 8192)),
    *(
        Prefill("ragged", QWEN2_2B, [1, 5, 64, 65, 128, 130, 300, 517], [1, 8, 164, 81, 128, 1130, 377, 2517], grown)
        for grown in (1, OUTGROWN)
    ),
)
VITS = (
    *(Vit(lengths) for lengths in ([6256], [1564], [1564] * 8, [4784], [18768])),
    *(Vit([256, 320, 1564, 385], dim, grown=grown) for dim in (72, 80) for grown in (1, OUTGROWN)),
)


class Paged(NamedTuple):
    """Requests whose blocks lie anywhere in the caches of several layers. Slots of none are not a number."""

    heads: Heads
    k: Tensor  # [layers, slots, kv_heads, d]
    v: Tensor
    tables: Tensor
    seq_lens: Tensor
    contexts: Sequence[int]
    scale: float  # of what is stored

    @classmethod
    def of(cls, heads: Heads, contexts: Sequence[int], *, is_fp8: bool = False) -> Paged:
        blocks = -(-max(contexts) // BLOCK)
        layers = copies(4 * sum(contexts) * heads.num_kv_heads * heads.head_dim, 28)
        order = torch.randperm(blocks * len(contexts), device=DEVICE).int()
        k, v = (random(layers, len(order) * BLOCK, heads.num_kv_heads, heads.head_dim) for _ in range(2))
        tables = order.view(len(contexts), -1)
        seq_lens = ints(contexts)
        positions = torch.arange(blocks * BLOCK, device=DEVICE).expand(len(contexts), -1)
        unused = slots_of(tables, positions)[positions >= seq_lens[:, None]]
        k[:, unused] = v[:, unused] = float("nan")
        if is_fp8:
            k, v = (as_stored(cache, FP8_SCALE, FP8) for cache in (k, v))
        scale = FP8_SCALE if is_fp8 else 1.0
        return cls(heads, k, v, tables, seq_lens, contexts, scale)

    @property
    def softmax_scale(self) -> float:
        return self.heads.head_dim**-0.5

    def new_tokens(self, q: Tensor, layer: int, rotary: int) -> NewTokens:
        """The latest token of each request: what the cache has of it, not turned, so that each call stores the same."""
        slots = slots_of(self.tables, self.seq_lens[:, None] - 1)[:, 0]
        latest = [(cache[layer][slots].float() * self.scale).to(DTYPE) for cache in (self.k, self.v)]
        cos = torch.ones(len(q), rotary, device=DEVICE, dtype=DTYPE)
        return NewTokens(torch.cat((q, *latest), dim=1), cos, torch.zeros_like(cos), slots.int())

    def expected(self, q: Tensor, lengths: Sequence[int]) -> Tensor:
        batch = AttentionBatch(list(lengths), list(self.contexts), self.tables.long(), self.seq_lens, BLOCK)
        k, v = (cache[0].float() * self.scale for cache in (self.k, self.v))
        return reference_attention(q.float(), k, v, batch, self.softmax_scale)


def slots_of(tables: Tensor, positions: Tensor) -> Tensor:
    """[requests, n] -> [requests, n]."""
    return tables.long().gather(1, positions.long() // BLOCK) * BLOCK + positions % BLOCK


# --- decode -------------------------------------------------------------------------------------------------------


def decode(works: Iterable[Decode] = DECODES) -> Iterator[Case]:
    for work in works:
        heads = work.heads
        requests = len(work.contexts)
        paged = Paged.of(heads, work.contexts, is_fp8=work.is_fp8)
        q = random(requests, heads.num_heads, heads.head_dim)
        news = [paged.new_tokens(q, layer, work.rotary) for layer in range(len(paged.k))]
        ours = {"chosen": _chosen(paged, news), "triton": _by_triton(paged, news)}
        if is_hopper(DEVICE):
            ours |= _by_hopper(paged, news)
        size = 2 * sum(work.contexts) * heads.num_kv_heads * heads.head_dim * paged.k.element_size()
        name = f"decode {work.name}{' fp8' if work.is_fp8 else ''}, {requests} x {max(work.contexts)}"
        yield Case(name, ours, read_us(size), paged.expected(q, [1] * requests))


def _chosen(paged: Paged, news: Sequence[NewTokens]) -> list[Call]:
    """As the engine does, with the kernel that it chooses."""
    attention = DecodeAttention(paged.heads, paged.k.dtype, BLOCK, len(paged.contexts), DEVICE)
    schedule = attention.plan(paged.seq_lens)
    arguments = (paged.tables, paged.seq_lens, paged.softmax_scale, schedule, None, (paged.scale, paged.scale))
    return [partial(attention, new, k, v, *arguments) for new, k, v in zip(news, paged.k, paged.v, strict=True)]


def _by_triton(paged: Paged, news: Sequence[NewTokens]) -> list[Call]:
    workspace = DecodeWorkspace.allocate(len(paged.contexts), *paged.heads, DEVICE)
    arguments = (paged.tables, paged.seq_lens, BLOCK, paged.softmax_scale, workspace)
    scales = (paged.scale, paged.scale)
    return [
        partial(paged_decode, new, k, v, *arguments, scales=scales)
        for new, k, v in zip(news, paged.k, paged.v, strict=True)
    ]


def _by_hopper(paged: Paged, news: Sequence[NewTokens]) -> dict[str, list[Call]]:
    from saccade.kernels.attention.decode_hopper import hopper_decode, suits
    from saccade.kernels.attention.decode_hopper_schedule import plan_schedule

    if not suits(paged.heads.head_dim, paged.heads.num_heads // paged.heads.num_kv_heads, paged.k.dtype, BLOCK):
        return {}
    schedule = plan_schedule(paged.seq_lens, paged.heads.num_kv_heads, num_sms(DEVICE))
    workspace = DecodeWorkspace.allocate(len(paged.contexts), *paged.heads, DEVICE)
    run = partial(hopper_decode, block_size=BLOCK, scale=paged.softmax_scale, workspace=workspace, schedule=schedule)
    layers = zip(news, paged.k, paged.v, strict=True)
    return {"hopper": [partial(run, new, k, v, paged.tables, paged.seq_lens) for new, k, v in layers]}


# --- prefill ------------------------------------------------------------------------------------------------------


def prefill(works: Iterable[Prefill] = PREFILLS) -> Iterator[Case]:
    for work in works:
        heads = work.heads
        tokens = sum(work.lengths)
        paged = Paged.of(heads, work.contexts)
        paged.k[:, slots_of(paged.tables, torch.stack((paged.seq_lens // 3, 2 * paged.seq_lens // 3), 1))] *= work.grown
        q = random(tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)[:, : heads.num_heads]
        rows = choose_rows(tokens, heads.num_heads, num_sms(DEVICE), heads.head_dim)
        ours = {"triton": _windows(paged_prefill, paged, work, q, rows)}
        if is_hopper(DEVICE):
            ours |= _windows_by_hopper(paged, work, q)
        pairs = sum(
            length * (context - length) + length * (length + 1) / 2
            for length, context in zip(work.lengths, work.contexts, strict=True)
        )
        name = f"prefill {work.name}, {work.lengths} of {work.contexts}{_grown(work.grown)}"
        floor = compute_us(4 * heads.head_dim * heads.num_heads * pairs)
        yield Case(name, ours, floor, paged.expected(q, work.lengths), _dense(paged, work, q))


def _grown(factor: float) -> str:
    return "" if factor == 1 else ", outgrown"


def _windows(kernel: Callable[..., Tensor], paged: Paged, work: Prefill, q: Tensor, rows: int) -> list[Call]:
    tiles = Tiles.of(work.lengths, rows, DEVICE, seq_lens=work.contexts)
    arguments = (paged.tables, paged.seq_lens, tiles, BLOCK, paged.softmax_scale)
    return [partial(kernel, q, k, v, *arguments) for k, v in zip(paged.k, paged.v, strict=True)]


def _windows_by_hopper(paged: Paged, work: Prefill, q: Tensor) -> dict[str, list[Call]]:
    from saccade.kernels.attention.prefill_hopper import ROWS, hopper_prefill, suits

    if not suits(paged.heads.head_dim, DTYPE, BLOCK):
        return {}
    return {"hopper": _windows(hopper_prefill, paged, work, q, ROWS)}


def _dense(paged: Paged, work: Prefill, q: Tensor) -> dict[str, list[Call]]:
    """PyTorch's, with keys that lie in a row, for one request from its beginning."""
    if len(work.lengths) > 1 or work.lengths != work.contexts:
        return {}
    tokens = work.lengths[0]
    k, v = (cache[0, :tokens].transpose(0, 1)[None].contiguous() for cache in (paged.k, paged.v))
    queries = q.transpose(0, 1)[None].contiguous()
    dense = partial(F.scaled_dot_product_attention, queries, k, v, is_causal=True, enable_gqa=True)
    return {"torch, dense": [dense] * 8}


# --- images -------------------------------------------------------------------------------------------------------


def vit(works: Iterable[Vit] = VITS) -> Iterator[Case]:
    for work in works:
        lengths = work.lengths
        scale = work.head_dim**-0.5
        inputs = [random(sum(lengths), 3, work.heads, work.head_dim) for _ in range(4)]
        inputs[0][[lengths[0] // 8, 3 * lengths[0] // 4, lengths[0] - 6], 1] *= work.grown
        tiles = Tiles.of(lengths, TILE_ROWS, DEVICE)
        ours: dict[str, list[Call]] = {"triton": [partial(packed_vit, *x.unbind(1), tiles, scale) for x in inputs]}
        if is_hopper(DEVICE):
            from saccade.kernels.attention.vit_hopper import HopperVit
            from saccade.kernels.attention.vit_schedule import TileSchedule

            attend = HopperVit(TileSchedule.of(lengths, work.heads, num_sms(DEVICE), DEVICE))
            ours["hopper"] = [partial(attend, x, scale) for x in inputs]
        expected = packed_attention(*inputs[0].float().unbind(1), lengths, scale)
        floor = compute_us(4 * work.head_dim * work.heads * sum(n * n for n in lengths))
        beside = _torch_vit(work, inputs) if len(set(lengths)) == 1 else {}
        name = f"images {len(lengths)} x {lengths[0]}, d {work.head_dim}{_grown(work.grown)}"
        yield Case(name, ours, floor, expected, beside)


def _torch_vit(work: Vit, inputs: Sequence[Tensor]) -> dict[str, list[Call]]:
    """Equal images are one batch for SDPA."""
    count = len(work.lengths)
    length = work.lengths[0]
    strided = [x.view(count, -1, 3, work.heads, work.head_dim).permute(2, 0, 3, 1, 4) for x in inputs]
    starts = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=DEVICE)
    return {
        "torch flash": [partial(_sdpa, x, SDPBackend.FLASH_ATTENTION) for x in strided],
        "torch cudnn": [partial(_sdpa, x, SDPBackend.CUDNN_ATTENTION) for x in strided],
        "torch varlen": [partial(varlen_attn, *x.unbind(1), starts, starts, length, length) for x in inputs],
    }


def _sdpa(qkv: Tensor, backend: SDPBackend) -> Tensor:
    q, k, v = qkv
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)
