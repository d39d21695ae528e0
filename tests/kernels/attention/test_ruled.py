"""Attention with a rule beside its reference, over paged keys that lie anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from saccade.kernels.attention.ruled import Interval, block_ends, ruled_attention, store_pairs
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.layers.attention_rules import READ_AT_ONCE, AttentionRule, rule_attention
from saccade.models.layers.torch_attention import AttentionBatch, of_heads
from tests.helpers.kernels.paged import DEVICE

BLOCK_SIZE = 16
RULES: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "window": {"window": 7},
    "chunk": {"chunk": 16},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 9, "softcap": 5.0, "sinks": True},
    "blocks": {"blocks": True},
    "blocks in a window": {"blocks": True, "window": 6},
    "blocks beyond a window": {"blocks": True, "window": 6, "is_block_whole": True},
    "blocks in chunks": {"blocks": True, "chunk": 32},
}


def blocks_of(queries: Sequence[int], contexts: Sequence[int]) -> torch.Tensor:
    """A third of a long window is a block."""
    blocks: list[int] = []
    for length, context in zip(queries, contexts, strict=True):
        own = list(range(context - length, context))
        if length > 8:
            first = length // 3
            own[first : 2 * first] = own[first : first + 1] * first
        blocks += own
    return torch.tensor(blocks, device=DEVICE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "queries", "contexts", "splits"),
    [(4, 2, 32, (20, 5), (20, 40), 1), (7, 1, 24, (1, 1, 1), (5, 33, 1), 1), (6, 2, 16, (1, 9), (600, 30), 4)],
    ids=["prefill", "decode", "splits"],
)
def test_a_rule_gives_what_its_reference_gives(
    rule: str, heads: int, kv_heads: int, dim: int, queries: tuple[int, ...], contexts: tuple[int, ...], splits: int
) -> None:
    given = dict(RULES[rule])
    if "sinks" in given:
        given["sinks"] = torch.randn(heads, device=DEVICE)
    if "blocks" in given:
        given["blocks"] = blocks_of(queries, contexts)
    wanted = AttentionRule(**given)
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(counts), device=DEVICE).split(counts)
    tables = torch.stack([torch.nn.functional.pad(own, (0, max(counts) - len(own))) for own in order])
    stored = torch.randn(2, sum(counts) * BLOCK_SIZE, kv_heads * dim + 8, device=DEVICE)  # wider than these heads
    keys, values = (of_heads(cache, kv_heads, dim) for cache in stored)
    q = torch.randn(sum(queries), heads, dim, device=DEVICE)
    batch = AttentionBatch(list(queries), list(contexts), tables, torch.empty(0), BLOCK_SIZE)
    expected = rule_attention(q, keys, values, batch, 0.2, wanted)
    blocks = None if wanted.blocks is None else block_ends(wanted.blocks)
    interval = Interval(wanted.window, wanted.chunk, wanted.softcap, wanted.sinks, blocks, wanted.is_block_whole)
    tiles = Tiles.of(queries, 1 if max(queries) == 1 else 64, DEVICE)
    seq_lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    paged = (keys, values, tables.int(), seq_lens, tiles, BLOCK_SIZE, 0.2)
    torch.testing.assert_close(ruled_attention(q, *paged, interval, splits=splits), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_without_a_context_is_zero_and_stores_nothing(splits: int) -> None:
    cache = torch.zeros(2, BLOCK_SIZE, 2, 16, device=DEVICE)
    new = torch.randn(2, 8, 16, device=DEVICE)
    q, k, v = new.split([4, 2, 2], dim=1)
    store_pairs(k, v, *cache, torch.tensor([3, -1], dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(cache[0, 3], k[0])
    torch.testing.assert_close(cache[1, 3], v[0])
    assert int(cache.count_nonzero()) == 2 * 32
    tiles = Tiles.of([1, 1], 1, DEVICE)
    seq_lens = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    mixed = ruled_attention(q, *cache, tables, seq_lens, tiles, BLOCK_SIZE, 0.2, Interval(), splits=splits)
    assert bool(mixed[0].any()) and not bool(mixed[1].any())


@pytest.mark.parametrize(("length", "splits"), [(1, 1), (1, 4), (30, 1)])
def test_a_window_reads_nothing_from_further_back_than_a_tile(length: int, splits: int) -> None:
    """Blocks there may be another request's by now, and NaN times a weight of zero is NaN."""
    context, window = 600, 7
    unread = (context - length - window + 2 - READ_AT_ONCE) // BLOCK_SIZE * BLOCK_SIZE
    q = torch.randn(length, 4, 32, device=DEVICE)
    keys, values = torch.randn(2, 38 * BLOCK_SIZE, 2, 32, device=DEVICE)
    keys[:unread] = values[:unread] = torch.nan
    tables = torch.arange(38, device=DEVICE)[None]
    rule = AttentionRule(window=window)
    batch = AttentionBatch([length], [context], tables, torch.empty(0), BLOCK_SIZE)
    expected = rule_attention(q, keys, values, batch, 0.2, rule)
    tiles = Tiles.of([length], 1 if length == 1 else 64, DEVICE)
    seq_lens = torch.tensor([context], dtype=torch.int32, device=DEVICE)
    paged = (keys, values, tables.int(), seq_lens, tiles, BLOCK_SIZE, 0.2)
    found = ruled_attention(q, *paged, Interval(window=window), splits=splits)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not expected.isnan().any()
