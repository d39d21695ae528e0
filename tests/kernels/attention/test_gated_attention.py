"""What gated attention and attention temperature need of the kernels, against the layers in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, launch_for, paged_decode
from saccade.kernels.attention.prefill_triton import choose_rows
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops import reference
from saccade.kernels.ops.output_gate import sigmoid_gate
from saccade.kernels.ops.prepare_inputs import (
    DecodeMetadata,
    PrefillMetadata,
    RotaryFrequencies,
    Temperature,
    decode_inputs,
    prefill_inputs,
)
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.layers.attention_temperature import AttentionTemperature
from saccade.models.layers.hybrid_decoder import GatedAttention
from saccade.models.layers.rotary_embedding import Rotary, rotate
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV, reference_attention
from saccade.models.state_dict import Parameters
from tests.helpers.kernels.paged import BLOCK, DEVICE, HALF, SMALL, Paged, assert_close, ints, random

HEADS, KV_HEADS = 4, 2


def wide(*shape: int, extra: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[T, heads, d], a slice of rows that are `extra` heads wider, whose rest is not a number."""
    tokens, heads, dim = shape
    rows = torch.full((tokens, heads + extra, dim), float("nan"), dtype=dtype, device=DEVICE)
    rows[:, :heads] = random(*shape, dtype=dtype, seed=seed)
    return rows[:, :heads]


def split(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=-2)


def workspace_for(requests: int, dim: int) -> DecodeWorkspace:
    return DecodeWorkspace.allocate(8 * requests, HEADS, KV_HEADS, dim, DEVICE)  # of more, for any splits


def decoded(paged: Paged, new: NewTokens, splits: int | None = None) -> Tensor:
    workspace = workspace_for(len(new.slots), new.qkv.shape[-1])
    seq_lens = ints(paged.seq_lens)
    return paged_decode(
        new, paged.k, paged.v, paged.tables, seq_lens, BLOCK, 0.2, workspace, splits=splits, launch=SMALL
    )


# --- decode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(("dim", "rotary"), [(32, 8), (80, 20), (256, 64), (32, 32)])
def test_decode_rotates_the_first_dimensions_of_wider_rows(dim: int, rotary: int, splits: int) -> None:
    paged = Paged.of([20, 35], KV_HEADS, dim, torch.float32)
    before = Paged(paged.k.clone(), paged.v.clone(), paged.tables, paged.seq_lens)
    qkv = wide(2, HEADS + 2 * KV_HEADS, dim, extra=HEADS)
    cos, sin = random(2, 2, rotary, seed=3)
    slots = ints([paged.slot(0), paged.slot(1)])
    scales = torch.tensor([1.0, 1.7], device=DEVICE)
    q, k, v = split(qkv.clone())
    reference.rotary_and_store(q, k, v, cos, sin, before.k, before.v, slots.long(), scales)
    found = decoded(paged, NewTokens(qkv, cos, sin, slots, scales), splits)
    assert_close(found, before.expected(q, [1, 1]))
    assert_close(paged.k[slots.long()], before.k[slots.long()])
    assert_close(paged.v[slots.long()], before.v[slots.long()])


def test_decode_adds_up_partials_that_are_slices() -> None:
    paged = Paged.of([20, 35], KV_HEADS, 32, torch.float32)
    whole, noise = random(2, 8, 32), random(2, 8, 32, seed=5)
    parts = torch.full((2, 2, 12, 32), float("nan"), device=DEVICE)
    parts[0, :, :8], parts[1, :, :8] = noise, whole - noise
    cos, sin = random(2, 2, 8, seed=3)
    slots = ints([-1, -1])
    expected = decoded(paged, NewTokens(whole, cos, sin, slots))
    assert_close(decoded(paged, NewTokens(parts[:, :, :8], cos, sin, slots)), expected)


def test_decode_of_large_heads_runs_in_half_precision_with_its_own_launch() -> None:
    paged = Paged.of([150, 9], KV_HEADS, 256, HALF)
    q = random(2, HEADS, 256, dtype=HALF)
    assert_close(paged.decode(q, 2, launch=None), paged.expected(q, [1] * 2))


@pytest.mark.parametrize("splits", [1, 4, 16])
def test_large_heads_take_as_much_shared_memory_as_usual_ones(splits: int) -> None:
    usual, large = (launch_for(torch.empty(16, 2, dim, dtype=HALF), 8, splits) for dim in (128, 256))
    assert large.keys * 2 == usual.keys and large.stages <= usual.stages


# --- prefill ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(32, 8), (80, 20), (256, 64)])
def test_the_first_dimensions_rotate_and_all_are_stored(
    dim: int, rotary: int, dtype: torch.dtype, has_scales: bool
) -> None:
    found, expected = (wide(4, 8, dim, extra=4, dtype=dtype) for _ in range(2))
    cos, sin = random(2, 4, 1, rotary, dtype=dtype, seed=1)
    scales = random(4, seed=2).abs() if has_scales else None
    caches = [torch.zeros(2, 32, KV_HEADS, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    slots = ints([7, -1, 31, 0], torch.int64)
    rotary_and_store(*split(found), cos, sin, *caches[0], slots, scales)
    reference.rotary_and_store(*split(expected), cos, sin, *caches[1], slots, scales)
    assert_close(found, expected)
    assert_close(caches[0], caches[1])


@pytest.mark.parametrize("turn", [slice(0, 16), slice(16, 20)], ids=str)
def test_layers_rotate_by_columns_of_their_own_and_store_in_wider_slots(turn: slice) -> None:
    found, expected = (random(4, 8, 32) for _ in range(2))
    cos, sin = random(2, 4, 2 * 20, seed=1)
    own = [torch.cat([half[:, turn] for half in part.chunk(2, 1)], 1) for part in (cos, sin)]
    wider, caches = torch.zeros(2, 32, KV_HEADS + 1, 32, device=DEVICE), torch.zeros(2, 32, KV_HEADS, 32, device=DEVICE)
    slots = ints([7, -1, 31, 0], torch.int64)
    rotary_and_store(*split(found), cos, sin, *wider[:, :, :KV_HEADS], slots, turn=turn)
    reference.rotary_and_store(*split(expected), *own, *caches, slots)
    assert_close(found, expected)
    assert_close(wider[:, :, :KV_HEADS], caches)


@pytest.mark.parametrize("has_scales", [False, True])
def test_partials_that_are_slices_rotate_in_part(has_scales: bool) -> None:
    whole, noise = random(4, 8, 32), random(4, 8, 32, seed=5)
    parts = torch.full((2, 4, 12, 32), float("nan"), device=DEVICE)
    parts[0, :, :8], parts[1, :, :8] = noise, whole - noise
    cos, sin = random(2, 4, 8, seed=1)
    scales = random(4, seed=2).abs() if has_scales else None
    caches = [torch.zeros(2, 32, KV_HEADS, 32, device=DEVICE) for _ in range(2)]
    slots = ints([7, -1, 31, 0])
    q = rotary_and_store(*split(parts[:, :, :8]), cos, sin, *caches[0], slots, scales)
    reference.rotary_and_store(*split(whole), cos, sin, *caches[1], slots, scales)
    assert_close(q, whole[:, :HEADS])
    assert_close(caches[0], caches[1])


@pytest.mark.parametrize("splits", [1, 4])
def test_prefill_takes_large_heads_of_wider_rows(splits: int) -> None:
    paged = Paged.of([20, 40], KV_HEADS, 256, torch.float32)
    q = wide(21, HEADS, 256, extra=6)
    assert_close(paged.prefill(q, [18, 3], splits=splits), paged.expected(q, [18, 3]))


@pytest.mark.parametrize("rows", [64, 128])
def test_prefill_of_large_heads_runs_in_half_precision_with_its_own_launch(rows: int) -> None:
    paged = Paged.of([150], 1, 256, HALF)
    q = random(130, 2, 256, dtype=HALF)
    assert_close(paged.prefill(q, [130], rows, launch=None), paged.expected(q, [130]))


# --- gate and norms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [8, 1100])
def test_the_gate_multiplies_in_place(columns: int, dtype: torch.dtype) -> None:
    found, expected = (random(3, columns, dtype=dtype) for _ in range(2))
    gate = random(3, columns + 24, dtype=dtype, seed=1)[:, 16 : columns + 16]
    assert sigmoid_gate(found, gate) is found
    assert_close(found, reference.sigmoid_gate(expected, gate))


@pytest.mark.parametrize("dim", [32, 256])
def test_heads_of_wider_rows_are_normed_by_float32_weights(dim: int) -> None:
    found, expected = (wide(3, 8, dim, extra=4, dtype=torch.bfloat16) for _ in range(2))
    q, k = 1 + 0.1 * random(2, dim, seed=2)
    qk_rms_norm(found, q, k, HEADS, 1e-6)
    reference.qk_rms_norm(expected, q, k, HEADS, 1e-6)
    assert_close(found, expected)


# --- temperature --------------------------------------------------------------------------------------------------


def test_a_step_begins_with_the_temperature_of_its_positions() -> None:
    positions, tables = ints([0, 99, 100, 999]), ints([0] * 4).view(4, 1)
    expected = AttentionTemperature(0.1, 100).factors(positions)
    embedding, frequencies = random(9, 16), random(4).abs()
    zeros, ones = ints([0] * 4), ints([1] * 4)
    decode = DecodeMetadata(zeros, positions, zeros - 1, ones, ints([0, 1, 2, 3]))
    temperature = Temperature(0.1, 100)
    found = decode_inputs(
        decode, ints([0] * 4, torch.int64), embedding, frequencies, tables, BLOCK, temperature=temperature
    )
    assert found.query_scales is not None and found.cos.shape == (4, 8)
    assert_close(found.query_scales, expected)
    prefill = PrefillMetadata(zeros, torch.stack([positions, zeros]), zeros[:1], ones[:1])
    rotary = RotaryFrequencies(frequencies, ints([1, 0, 1, 0], torch.int64))
    ready = prefill_inputs(prefill, random(4, 16), embedding, rotary, tables, BLOCK, temperature)
    assert ready.query_scales is not None
    assert_close(ready.query_scales, expected)


def test_decode_and_prefill_scale_queries_as_the_layer_does() -> None:
    layer, positions = AttentionTemperature(0.5, 16), torch.tensor([[19, 34]], device=DEVICE)
    paged = Paged.of([20, 35], KV_HEADS, 32, torch.float32)
    qkv, (cos, sin) = random(2, 8, 32), random(2, 2, 1, 32, seed=3)
    slots = ints([paged.slot(0), paged.slot(1)])
    batch = AttentionBatch([1, 1], paged.seq_lens, paged.tables.long(), slots.long(), BLOCK)
    kv = PagedKV(paged.k[None].clone(), paged.v[None].clone())
    attend = layer.around(PagedAttention(kv, batch, 0.2, reference_attention), positions)
    q, k, v = split(qkv)
    expected = attend(0, rotate(q, cos, sin), rotate(k, cos, sin), v)
    scales = layer.factors(positions[0])
    assert_close(decoded(paged, NewTokens(qkv, cos[:, 0], sin[:, 0], slots, scales)), expected)
    rotary_and_store(q, k, v, cos, sin, paged.k, paged.v, slots, scales)
    assert_close(paged.prefill(q, [1, 1]), expected)


# --- the layer ----------------------------------------------------------------------------------------------------


class Fused:
    """`GatedAttention` by kernels. Rows of its projection are q | k | v | gate."""

    def __init__(self, layer: GatedAttention, kv: PagedKV) -> None:
        self.weight = layer.qkv.weight
        self.norms = (layer.qk_norms.q.weight, layer.qk_norms.k.weight)
        self.layer = layer
        self.kv = kv

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        rows = F.linear(x, self.weight)
        width = (layer.heads + 2 * layer.kv_heads) * layer.head_dim
        qkv = rows[:, :width].unflatten(1, (-1, layer.head_dim))
        qk_rms_norm(qkv, *self.norms, layer.heads, layer.qk_norms.eps)
        return qkv, rows[:, width:]

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return self.layer.out(sigmoid_gate(mixed.flatten(1), gate))

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch) -> Tensor:
        qkv, gate = self.project(x)
        new = NewTokens(qkv, cos, sin, batch.slots.int())
        caches = (self.kv.k[0], self.kv.v[0], batch.block_tables.int(), ints(batch.seq_lens))
        workspace = workspace_for(len(x), self.layer.head_dim)
        scale = self.layer.head_dim**-0.5
        return self.finish(paged_decode(new, *caches, BLOCK, scale, workspace, launch=SMALL), gate)

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch) -> Tensor:
        qkv, gate = self.project(x)
        q = rotary_and_store(*split(qkv), cos, sin, self.kv.k[0], self.kv.v[0], batch.slots)
        tiles = Tiles.of(batch.query_lens, 16, DEVICE, seq_lens=batch.seq_lens)
        paged = Paged(self.kv.k[0], self.kv.v[0], batch.block_tables.int(), batch.seq_lens)
        return self.finish(_prefilled(paged, q, tiles, self.layer.head_dim**-0.5), gate)


def _prefilled(paged: Paged, q: Tensor, tiles: Tiles, scale: float) -> Tensor:
    from saccade.kernels.attention.prefill_triton import paged_prefill

    seq_lens = ints(paged.seq_lens)
    return paged_prefill(q, paged.k, paged.v, paged.tables, seq_lens, tiles, BLOCK, scale, launch=SMALL)


@pytest.mark.parametrize("dim", [32, 256])
def test_a_prompt_and_its_next_token_equal_the_layer(dim: int) -> None:
    text = TextConfig(48, 96, 1, HEADS, KV_HEADS, dim, 200, 512, 1e-6, 1e4, None, {}, False, "qwen3_5")
    params = Parameters(torch.float32, DEVICE)
    layer = GatedAttention(params, text)
    for seed, tensor in enumerate(params.targets.values()):
        tensor.copy_(random(*tensor.shape, seed=seed) / 8)
    rotary = Rotary(replace(text, head_dim=dim // 4), DEVICE)
    caches = [PagedKV(*random(2, 1, 3 * BLOCK, KV_HEADS, dim, seed=9)) for _ in range(2)]
    fused = Fused(layer, caches[0])
    tables = ints([2, 0], torch.int64).view(1, 2)
    for start, end in ((0, 18), (18, 19)):
        x = random(end - start, 48, seed=start)
        positions = torch.arange(start, end, device=DEVICE)
        slots = tables[0, positions // BLOCK] * BLOCK + positions % BLOCK
        batch = AttentionBatch([end - start], [end], tables, slots, BLOCK)
        cos, sin = rotary(positions[None], torch.float32)
        expected = layer(x, cos, sin, PagedAttention(caches[1], batch, dim**-0.5, reference_attention), 0)
        run = fused.prefill if start == 0 else fused.decode
        assert_close(run(x, cos[:, 0], sin[:, 0], batch), expected)
        assert_close(caches[0].k, caches[1].k)


def test_large_heads_have_small_tiles() -> None:
    assert choose_rows(512, 16, num_sms=132, dim=256) == 64
