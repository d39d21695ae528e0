"""Cross-attention to states that lie anywhere, against PyTorch's: stretches, splits, rows that attend to nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.attention.cross import Stretches, choose_splits, cross_attention, tile_tokens
from saccade.kernels.launch.varlen_tiles import Tiles
from tests.helpers.kernels.paged import DEVICE, HALF, assert_close, ints, random

STATES = 90
KV_HEADS, DIM = 2, 24


def cache(dtype: torch.dtype = torch.float32, layers: int = 3) -> Tensor:
    """[states, layers, k and v, kv_heads, d]; states of nobody are not numbers."""
    found = torch.full((STATES, layers, 2, KV_HEADS, DIM), float("nan"), dtype=dtype, device=DEVICE)
    found[:80] = random(80, layers, 2, KV_HEADS, DIM, dtype=dtype, seed=1)
    return found


def tables(counts: list[int], width: int = 88) -> Tensor:
    """States of each stretch in any order, then entries that nobody may read."""
    order = torch.Generator().manual_seed(3)
    rows = [torch.randperm(80, generator=order)[:count] for count in counts]
    return torch.stack([F.pad(row, (0, width - len(row)), value=85) for row in rows]).int().to(DEVICE)


def expected(q: Tensor, keys: Tensor, values: Tensor, found: Tensor, lengths: list[int], counts: list[int]) -> Tensor:
    parts = []
    group = q.shape[1] // KV_HEADS
    for part, row, count in zip(torch.split(q, lengths), found, counts, strict=True):
        states = row[:count].long()
        k, v = (t[states].repeat_interleave(group, 1).transpose(0, 1).float() for t in (keys, values))
        mixed = F.scaled_dot_product_attention(part.transpose(0, 1).float(), k, v, scale=0.3)
        parts.append(mixed.transpose(0, 1) if count else torch.zeros_like(part))
    return torch.cat(parts).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [2, 6, 8])
def test_stretches_attend_to_their_states_and_no_others(
    heads: int, splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.kernels.attention.cross._MIN_SHARE", 16)
    lengths, counts = [5, 1, 9, 2], [70, 33, 0, 1]
    found, layer = tables(counts), cache(dtype)[:, 1]
    keys, values = layer[:, 0], layer[:, 1]
    tiles = Tiles.of(lengths, tile_tokens(4, heads, KV_HEADS), DEVICE, capacity=9)
    q = random(sum(lengths), heads, DIM, dtype=dtype)
    stretches = Stretches(tiles, found, ints([0, 1, 2, 3]), ints(counts))
    mixed = cross_attention(q, keys, values, stretches, 0.3, splits=splits)
    assert_close(mixed, expected(q, keys, values, found, lengths, counts))
    assert not mixed[6:15].any(), "rows that attend to nothing"


def test_rows_of_tables_may_be_in_any_order() -> None:
    counts = [40, 7]
    found, layer = tables(counts), cache()[:, 2]
    stretches = Stretches(Tiles.of([1, 1], 1, DEVICE), found, ints([1, 0]), ints([7, 40]))
    q = random(2, 4, DIM)
    mixed = cross_attention(q, layer[:, 0], layer[:, 1], stretches, 0.3)
    assert_close(mixed, expected(q, layer[:, 0], layer[:, 1], found.flip(0), [1, 1], [7, 40]))


def test_what_is_given_is_written_to() -> None:
    layer, stretches = cache()[:, 0], Stretches(Tiles.of([3], 2, DEVICE), tables([20]), ints([0]), ints([20]))
    q, out = random(3, 4, DIM), torch.zeros(3, 4, DIM, device=DEVICE)
    found = cross_attention(q, layer[:, 0], layer[:, 1], stretches, 0.3, out=out)
    assert found is out and out.any()


def test_queries_may_be_a_part_of_wider_rows() -> None:
    layer, stretches = cache()[:, 0], Stretches(Tiles.of([3], 2, DEVICE), tables([20]), ints([0]), ints([20]))
    wide = random(3, 6, DIM)
    plain = cross_attention(wide[:, :4].contiguous(), layer[:, 0], layer[:, 1], stretches, 0.3)
    assert_close(cross_attention(wide[:, :4], layer[:, 0], layer[:, 1], stretches, 0.3), plain)


def test_splits_fill_the_device_and_no_split_is_tiny() -> None:
    assert choose_splits(8, 6404, 132) == 32  # one request, 8 KV heads
    assert choose_splits(8 * 32, 6404, 132) == 1
    assert choose_splits(8, 200, 132) == 1
