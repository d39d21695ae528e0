"""MLA kernels against the layer: RoPE, norm and store; attention in the absorbed and in the expanded form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import MLAConfig, TextConfig
from saccade.kernels.attention import mla_absorbed, mla_expanded
from saccade.kernels.attention.mla_absorbed import (
    choose_splits,
    decode_launch,
    mla_decode,
    mla_prefill,
    prefill_launch,
    tile_tokens,
)
from saccade.kernels.attention.mla_expanded import (
    GATHERED,
    MLADims,
    expand_context,
    is_worth_it,
    launch_for,
    mla_expanded_prefill,
    tile_rows,
)
from saccade.kernels.attention.mla_store import mla_rope_store
from saccade.kernels.launch.varlen_tiles import Launch, Tiles
from saccade.models.layers.mla import LatentAttention, rotate_pairs
from saccade.models.layers.rotary_embedding import cos_sin
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV, reference_attention
from saccade.models.state_dict import Parameters
from tests.helpers.kernels.paged import BLOCK, DEVICE, HALF, Paged, assert_close, ints, random

RANK, ROPE, NOPE, VALUE, SCALE = 32, 16, 24, 20, 0.2
DIM = RANK + ROPE
SMALL, PUBLISHED = MLADims(RANK, NOPE, ROPE, VALUE), MLADims(512, 128, 64, 128)
ROWS = Launch(rows=16, keys=16, warps=4, stages=1, one_loop=True)  # many tiles from few keys


def latents(seq_lens: list[int], dtype: torch.dtype, dim: int = DIM) -> Paged:
    paged = Paged.of(seq_lens, kv_heads=1, dim=dim, dtype=dtype)
    return paged._replace(v=paged.k)


def rotation(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin(random(tokens, 1, ROPE // 2, seed=5), dtype)
    return cos, sin


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("heads", [1, 5, 16])
def test_store_rotates_norms_and_writes_as_the_layer_does(heads: int, dtype: torch.dtype) -> None:
    projected = random(4, heads * 40 + DIM, dtype=dtype)  # queries of 24 + 16, then the latent and its rope
    q_rope = projected[:, : heads * 40].view(4, heads, 40)[..., 24:]
    kv = projected[:, heads * 40 :]
    cos, sin = rotation(4, dtype)
    weight, cache = random(RANK, dtype=dtype, seed=1), random(48, 1, DIM, dtype=dtype, seed=2)
    expected = cache.clone()
    kept = [0, 1, 3]
    slots = ints([17, 0, -1, 47])
    latent = F.rms_norm(kv[:, :RANK], (RANK,), weight, 1e-6)
    stored = torch.cat((latent, rotate_pairs(kv[:, None, RANK:], cos, sin)[:, 0]), dim=-1)
    expected[slots[kept].long(), 0] = stored[kept]
    queries = torch.zeros(4, heads, DIM, dtype=dtype, device=DEVICE)
    wanted = rotate_pairs(q_rope.contiguous(), cos, sin)
    mla_rope_store(q_rope, kv, cos, sin, weight, 1e-6, cache, slots, queries[..., RANK:])
    assert_close(cache, expected)
    assert_close(queries[..., RANK:], wanted)
    assert not queries[..., :RANK].any()


def test_store_may_rotate_queries_in_place() -> None:
    q, kv = random(3, 4, 40), random(3, DIM)
    before = q.clone()
    cos, sin = rotation(3)
    cache = random(16, 1, DIM)
    unchanged = cache.clone()
    mla_rope_store(q[..., 24:], kv, cos, sin, random(RANK), 1e-6, cache, ints([-1] * 3), q[..., 24:])
    assert_close(q[..., 24:], rotate_pairs(before[..., 24:].contiguous(), cos, sin))
    assert torch.equal(q[..., :24], before[..., :24])
    assert torch.equal(cache, unchanged), "padding rows store nothing"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [5, 16, 20])
def test_decode_is_the_reference_s(heads: int, splits: int) -> None:
    seq_lens = [1, 16, 71]
    paged, q = latents(seq_lens, torch.float32), random(3, heads, DIM)
    found = mla_decode(q, paged.k, paged.tables, ints(seq_lens), RANK, BLOCK, SCALE, splits=splits, launch=ROWS)
    assert_close(found, paged.expected(q, [1] * 3)[..., :RANK])


def test_decode_in_half_precision() -> None:
    seq_lens = [40, 5]
    paged, q = latents(seq_lens, HALF), random(2, 16, DIM, dtype=HALF)
    found = mla_decode(q, paged.k, paged.tables, ints(seq_lens), RANK, BLOCK, SCALE, launch=ROWS)
    assert_close(found, paged.expected(q, [1, 1])[..., :RANK])


@pytest.mark.parametrize("splits", [1, 2])
def test_decode_rows_of_padding_are_zero(splits: int) -> None:
    seq_lens = [70, 0, 3]
    paged, q = latents(seq_lens, torch.float32), random(3, 4, DIM)
    found = mla_decode(q, paged.k, paged.tables, ints(seq_lens), RANK, BLOCK, SCALE, splits=splits, launch=ROWS)
    assert not found[1].any()
    assert_close(found[[0, 2]], paged.expected(q[[0, 2]], [1, 0, 1])[..., :RANK])


def test_decode_at_the_published_size() -> None:
    """Rank 512 and rope 64, with the launch that a device would get."""
    paged, q = latents([37, 20], torch.float32, dim=576), random(2, 16, 576) / 8
    found = mla_decode(q, paged.k, paged.tables, ints([37, 20]), 512, BLOCK, SCALE)
    assert_close(found, paged.expected(q, [1, 1])[..., :512])


@pytest.mark.parametrize(
    ("heads", "splits", "one_loop"), [(4, 1, True), (4, 3, False), (5, 3, True), (16, 1, False), (20, 3, True)]
)
def test_prefill_windows_are_the_reference_s(heads: int, splits: int, one_loop: bool) -> None:
    lengths, seq_lens = [3, 1, 7], [3, 18, 40]
    paged, q = latents(seq_lens, torch.float32), random(11, heads, DIM)
    launch = ROWS._replace(one_loop=one_loop)
    tiles = Tiles.of(lengths, tile_tokens(heads, launch), DEVICE, seq_lens=seq_lens, capacity=20)
    found = mla_prefill(
        q, paged.k, paged.tables, ints(seq_lens), tiles, RANK, BLOCK, SCALE, splits=splits, min_share=16, launch=launch
    )
    assert_close(found, paged.expected(q, lengths)[..., :RANK])


def test_prefill_in_half_precision_with_the_launch_of_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_absorbed, "is_hopper", lambda device: True)
    lengths, seq_lens = [10, 3], [70, 3]
    paged, q = latents(seq_lens, HALF), random(13, 16, DIM, dtype=HALF)
    launch = prefill_launch(paged.k)
    assert launch.rows == 64
    tiles = Tiles.of(lengths, tile_tokens(16, launch), DEVICE, seq_lens=seq_lens)
    found = mla_prefill(q, paged.k, paged.tables, ints(seq_lens), tiles, RANK, BLOCK, SCALE)
    assert_close(found, paged.expected(q, lengths)[..., :RANK])


def expected_expanded(paged: Paged, q: Tensor, weight: Tensor, lengths: list[int]) -> Tensor:
    """By the absorbed form, as the layer computes it: [T, heads, VALUE]."""
    by_head = weight.view(q.shape[1], NOPE + VALUE, RANK).float()
    absorbed = torch.einsum("thd,hdr->thr", q[..., :NOPE].float(), by_head[:, :NOPE])
    mixed = paged.expected(torch.cat((absorbed, q[..., NOPE:].float()), dim=-1), lengths)[..., :RANK]
    return torch.einsum("thr,hdr->thd", mixed, by_head[:, NOPE:]).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("lengths", "seq_lens"), [([21], [21]), ([5, 1, 9], [5, 18, 40])])
def test_expanded_prefill_is_the_absorbed_one_s(lengths: list[int], seq_lens: list[int], dtype: torch.dtype) -> None:
    heads, tokens = 3, sum(lengths)
    paged = latents(seq_lens, dtype)
    q = random(tokens, heads * (NOPE + ROPE) + DIM, dtype=dtype)[:, : heads * (NOPE + ROPE)].view(tokens, heads, -1)
    weight = random(heads * (NOPE + VALUE), RANK, dtype=dtype, seed=3) / 4
    contexts = Tiles.of(seq_lens, GATHERED, DEVICE, capacity=12)
    context = expand_context(paged.k, paged.tables, contexts, sum(seq_lens) + 5, weight, SMALL, BLOCK)
    launch = ROWS if dtype == HALF else launch_for(q, tile_rows(q, *q.shape[:2]))
    tiles = Tiles.of(lengths, launch.rows, DEVICE, seq_lens=seq_lens, capacity=9)
    found = mla_expanded_prefill(q, context, tiles, SMALL, SCALE, launch=launch)
    assert_close(found, expected_expanded(paged, q, weight, lengths))


@pytest.mark.parametrize(
    ("lengths", "seq_lens", "expected"),
    [
        ([1600], [1600], True),
        ([2], [2], True),
        ([64], [4096], False),
        ([300], [4096], True),
        ([300, 4], [300, 9000], False),
    ],
)
def test_many_tokens_over_a_short_past_are_worth_expanding(
    lengths: list[int], seq_lens: list[int], expected: bool
) -> None:
    assert is_worth_it(lengths, seq_lens, PUBLISHED) is expected


def new_layer(heads: int) -> LatentAttention:
    mla = MLAConfig(RANK, ROPE, NOPE, VALUE, q_lora_rank=None)
    text = TextConfig(
        hidden_size=32, intermediate_size=32, num_layers=1, num_heads=heads, num_kv_heads=1, head_dim=DIM,
        vocab_size=8, max_position=99, rms_norm_eps=1e-6, rope_theta=1e4, mrope_section=None, rope_scaling={},
        tie_word_embeddings=True, model_type="deepseek_v2", mla=mla,
    )  # fmt: skip
    params = Parameters(torch.float32, DEVICE)
    layer = LatentAttention(params, text, mla)
    for seed, tensor in enumerate(params.targets.values()):
        tensor.copy_(random(*tensor.shape, seed=seed) / 4)
    return layer


@pytest.mark.parametrize("form", ["decode", "absorbed", "expanded"])
def test_the_launches_of_a_layer_give_what_the_layer_does(form: str) -> None:
    """Also an example of how they are put together."""
    heads, lengths, seq_lens = 4, [1, 1] if form == "decode" else [5, 2], [20, 37]
    layer, paged, tokens = new_layer(heads), latents(seq_lens, torch.float32), sum(lengths)
    ends = [sum(lengths[: i + 1]) for i in range(2)]
    positions = [(i, seq_lens[i] - (ends[i] - row)) for i in range(2) for row in range(ends[i] - lengths[i], ends[i])]
    slots = ints([int(paged.tables[i, p // BLOCK]) * BLOCK + p % BLOCK for i, p in positions])
    x, (cos, sin) = random(tokens, 32), rotation(tokens)
    cache = paged.k.clone()[None]
    batch = AttentionBatch(lengths, seq_lens, paged.tables.long(), slots.long(), BLOCK)
    expected = layer(x, cos, sin, PagedAttention(PagedKV(cache, cache), batch, SCALE, reference_attention), 0)

    projected = layer.inputs(x)
    q = projected[:, :-DIM].view(tokens, heads, NOPE + ROPE)
    q_nope, q_rope = q[..., :NOPE], q[..., NOPE:]
    queries = q.new_empty(tokens, heads, DIM)
    rotated = q_rope if form == "expanded" else queries[..., RANK:]
    mla_rope_store(q_rope, projected[:, -DIM:], cos, sin, layer.norm.weight, layer.norm.eps, paged.k, slots, rotated)
    if form == "expanded":
        weight = torch.cat((layer.to_keys, layer.to_values), dim=1).flatten(0, 1)
        context = expand_context(
            paged.k, paged.tables, Tiles.of(seq_lens, GATHERED, DEVICE), sum(seq_lens), weight, SMALL, BLOCK
        )
        tiles = Tiles.of(lengths, 16, DEVICE, seq_lens=seq_lens)
        values = mla_expanded_prefill(q, context, tiles, SMALL, SCALE, launch=ROWS)
    else:
        torch.bmm(q_nope.transpose(0, 1), layer.to_keys, out=queries[..., :RANK].transpose(0, 1))
        given = (queries, paged.k, paged.tables, ints(seq_lens))
        if form == "decode":
            mixed = mla_decode(*given, RANK, BLOCK, SCALE, launch=ROWS)
        else:
            tiles = Tiles.of(lengths, tile_tokens(heads, ROWS), DEVICE, seq_lens=seq_lens)
            mixed = mla_prefill(*given, tiles, RANK, BLOCK, SCALE, launch=ROWS)
        values = q.new_empty(tokens, heads, VALUE)
        torch.bmm(mixed.transpose(0, 1), layer.to_values.mT, out=values.transpose(0, 1))
    assert_close(layer.out(values.flatten(1)), expected)
    assert_close(paged.k[slots.long()], cache[0, slots.long()])


@pytest.mark.parametrize(("requests", "expected"), [(1, 64), (32, 4), (64, 2), (66, 2), (128, 1), (132, 1), (1000, 1)])
def test_splits_fill_the_device_in_whole_waves(requests: int, expected: int) -> None:
    assert choose_splits(requests, 8192, 132) == expected


def test_short_tables_have_few_splits() -> None:
    assert choose_splits(1, 200, 132) == 3
    assert choose_splits(1, 16, 132) == 1


@pytest.mark.parametrize(("hopper", "limit"), [(False, 99 << 10), (True, 227 << 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_the_absorbed_form_fit_shared_memory(
    hopper: bool, limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_absorbed, "is_hopper", lambda device: hopper)
    cache = torch.empty(16, 1, 576, dtype=dtype)
    for launch in (decode_launch(cache, 16), decode_launch(cache, 32), prefill_launch(cache)):
        vectors = launch.rows + launch.keys * launch.stages  # the queries, and tiles of keys
        assert vectors * 576 * cache.element_size() <= limit


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [40, 4000])
def test_tiles_of_the_expanded_form_fit_shared_memory(
    tokens: int, dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_expanded, "shared_memory", lambda device: limit)
    q = torch.empty(tokens, 16, 192, dtype=dtype)
    launch = launch_for(q, tile_rows(q, *q.shape[:2]))
    values = launch.rows * 192 + launch.keys * (192 + 128) * launch.stages
    assert values * q.element_size() <= limit
