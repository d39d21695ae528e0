"""The fast attention against the slow one, on steps of every shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.checkpoint.config import TextConfig
from saccade.models.layers.torch_attention import (
    AttentionBatch,
    Backend,
    PagedAttention,
    PagedKV,
    as_stored,
    packed_attention,
    reference_attention,
    reference_packed_attention,
    torch_attention,
)

BLOCK, NUM_BLOCKS, KV_HEADS, DIM = 4, 600, 2, 8
SCALE = DIM**-0.5
TEXT = TextConfig(
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=6,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    vocab_size=16,
    max_position=4096,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    mrope_section=None,
    rope_scaling={},
    tie_word_embeddings=False,
    model_type="llama",
)


def batch_of(windows: list[tuple[int, int]], *, scattered: bool = True, seed: int = 0) -> AttentionBatch:
    """A step from (new tokens, context) of each request; blocks anywhere in the cache, or in order."""
    counts = [-(-context // BLOCK) for _, context in windows]
    pool = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)) if scattered else None
    free = pool if pool is not None else torch.arange(NUM_BLOCKS)
    tables = torch.zeros(len(windows), max(counts), dtype=torch.int64)
    slots = []
    for i, (new, context) in enumerate(windows):
        start = sum(counts[:i])
        tables[i, : counts[i]] = free[start : start + counts[i]]
        places = torch.arange(context - new, context)
        slots.append(tables[i][places // BLOCK] * BLOCK + places % BLOCK)
    return AttentionBatch([n for n, _ in windows], [c for _, c in windows], tables, torch.cat(slots), BLOCK)


def tensors(batch: AttentionBatch, heads: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(NUM_BLOCKS * BLOCK, KV_HEADS, DIM, generator=generator) for _ in range(2))
    return torch.randn(sum(batch.query_lens), heads, DIM, generator=generator), k, v


def assert_equal_to_reference(batch: AttentionBatch, heads: int = 6) -> None:
    q, k, v = tensors(batch, heads)
    expected = reference_attention(q, k, v, batch, SCALE)
    torch.testing.assert_close(torch_attention(q, k, v, batch, SCALE), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "windows",
    [
        [(9, 9)],
        [(5, 23)],
        [(1, 1)],
        [(1, 17)],
        [(1, 8), (1, 8), (1, 8)],
        [(1, 3), (1, 40), (1, 41), (1, 2), (1, 39)],
        [(7, 7), (1, 12), (4, 10), (1, 30), (2, 2)],
        [(1024, 1025), (1, 12)],
        [(1030, 2050)],
    ],
    ids=[
        "prompt",
        "chunk",
        "first token",
        "decode",
        "equal decodes",
        "unequal decodes",
        "all mixed",
        "large chunk after one token",
        "large chunk",
    ],
)
@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "in order"])
def test_fast_attention_equals_the_reference(windows: list[tuple[int, int]], scattered: bool) -> None:
    assert_equal_to_reference(batch_of(windows, scattered=scattered))


@settings(max_examples=30, deadline=None)
@given(
    windows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=9),
    seed=st.integers(0, 9),
    group=st.integers(1, 4),
)
def test_fast_attention_equals_the_reference_on_any_step(windows: list[tuple[int, int]], seed: int, group: int) -> None:
    assert_equal_to_reference(batch_of([(n, n + past) for n, past in windows], seed=seed), heads=group * KV_HEADS)


def test_decodes_of_very_different_context_are_not_padded_together() -> None:
    plan = batch_of([(1, 400), (1, 10), (1, 390), (1, 12)]).plan
    assert sorted(len(group.rows) for group in plan.groups) == [2, 2]


def test_decodes_of_similar_context_share_one_batch() -> None:
    assert len(batch_of([(1, 100), (1, 97), (1, 90), (1, 101)]).plan.groups) == 1


def test_consecutive_blocks_are_read_in_place() -> None:
    batch = batch_of([(1, 30)], scattered=False)
    _, k, _ = tensors(batch)
    assert batch.plan.groups[0].keys.read(k, BLOCK).data_ptr() == k.data_ptr()


def test_keys_and_values_of_a_step_land_in_their_slots() -> None:
    batch = batch_of([(3, 5), (1, 9)])
    kv = PagedKV.allocate(TEXT, NUM_BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    q = torch.randn(4, 6, DIM)
    k, v = torch.randn(2, 4, KV_HEADS, DIM)
    PagedAttention(kv, batch, SCALE)(1, q, k, v)
    assert torch.equal(kv.k[1][batch.slots], k)
    assert torch.equal(kv.v[1][batch.slots], v)
    assert not kv.k[0].any()


@pytest.mark.parametrize("backend", [reference_attention, torch_attention])
def test_a_request_reads_blocks_another_one_fills_in_the_same_step(backend: object) -> None:
    """Two requests with a common first block: the second computes only its last token, the first writes the block."""
    tables = torch.tensor([[3, 5], [3, 7]])
    whole = AttentionBatch([6], [6], tables[1:], torch.tensor([12, 13, 14, 15, 28, 29]), BLOCK)
    shared = AttentionBatch([5, 2], [5, 6], tables, torch.tensor([12, 13, 14, 15, 20, 28, 29]), BLOCK)
    q, k, v = torch.randn(6, 6, DIM), torch.randn(6, KV_HEADS, DIM), torch.randn(6, KV_HEADS, DIM)
    rows = torch.tensor([0, 1, 2, 3, 0, 4, 5])  # the first request's fifth token is some other one

    def attend(batch: AttentionBatch, order: torch.Tensor) -> torch.Tensor:
        kv = PagedKV.allocate(TEXT, 8, BLOCK, torch.float32, torch.device("cpu"))
        return PagedAttention(kv, batch, SCALE, backend)(0, q[order], k[order], v[order])  # type: ignore[arg-type]

    alone = attend(whole, torch.arange(6))
    torch.testing.assert_close(attend(shared, rows)[-2:], alone[-2:])


def test_attention_runs_in_half_precision() -> None:
    batch = batch_of([(4, 9), (1, 20), (1, 22)])
    q, k, v = (x.bfloat16() for x in tensors(batch))
    expected = reference_attention(q, k, v, batch, SCALE)
    torch.testing.assert_close(torch_attention(q, k, v, batch, SCALE), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("lengths", [[5], [6, 6, 6], [3, 7, 7, 1]], ids=str)
def test_packed_attention_stays_inside_each_image(lengths: list[int]) -> None:
    q, k, v = torch.randn(3, sum(lengths), 4, DIM)
    expected = reference_packed_attention(q, k, v, lengths, SCALE)
    torch.testing.assert_close(packed_attention(q, k, v, lengths, SCALE), expected, atol=2e-6, rtol=1e-5)


def test_packed_attention_takes_heads_first_memory() -> None:
    q, k, v = torch.randn(3, 4, 10, DIM).transpose(1, 2)
    expected = packed_attention(q.contiguous(), k.contiguous(), v.contiguous(), [5, 5], SCALE)
    torch.testing.assert_close(packed_attention(q, k, v, [5, 5], SCALE), expected)


@pytest.mark.parametrize("backend", [reference_attention, torch_attention])
@pytest.mark.parametrize("scattered", [True, False])
def test_an_fp8_cache_gives_what_dequantised_keys_and_values_would(backend: Backend, scattered: bool) -> None:
    batch = batch_of([(3, 20), (1, 9)] if scattered else [(1, 30)], scattered=scattered)
    q, *cached = tensors(batch)
    scales = (0.25, 0.03)
    pairs = zip(cached, scales, strict=True)
    k, v = (as_stored(cache, scale, torch.float8_e4m3fn)[None].clone() for cache, scale in pairs)
    new = torch.randn(2, len(batch.slots), *k.shape[2:]) * 50  # some saturate
    found = PagedAttention(PagedKV(k, v, [scales]), batch, SCALE, backend)(0, q, *new)
    stored = (k[0].float() * scales[0], v[0].float() * scales[1])
    torch.testing.assert_close(found, reference_attention(q, *stored, batch, SCALE))
    for cache, own, scale in zip(stored, new, scales, strict=True):
        expected = as_stored(own, scale, torch.float8_e4m3fn).float() * scale
        assert torch.equal(cache[batch.slots], expected) and expected.abs().max() <= 448 * scale


def test_blocks_of_an_fp8_cache_are_cleared() -> None:
    kv = PagedKV.allocate(TEXT, 4, BLOCK, torch.float8_e4m3fn, torch.device("cpu"))
    for cache in kv[:2]:
        cache.view(torch.uint8).fill_(127)  # not a number
    kv.clear([2], BLOCK)
    assert not kv.k[:, 2 * BLOCK : 3 * BLOCK].float().any() and kv.v[:, :BLOCK].float().isnan().all()
    assert kv.bytes_per_token == 2 * TEXT.num_layers * KV_HEADS * DIM
