"""Which kernel attends for prompts. The Hopper kernel itself needs the device: it is tried there at start."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention import decode_triton, prefill, prefill_hopper, registry
from saccade.kernels.attention.prefill import PrefillAttention
from saccade.kernels.attention.prefill_combine import MAX_SPLITS, Partials, combine
from saccade.kernels.attention.prefill_hopper import ROWS, choose_splits, suits
from saccade.kernels.attention.prefill_triton import choose_rows
from saccade.kernels.attention.registry import PREFILL, Usable
from saccade.kernels.launch.device import HOPPER, Gpu, Heads
from saccade.kernels.launch.varlen_tiles import Tiles
from tests.helpers.kernels.paged import BLOCK, DEVICE, HALF, Paged, assert_close, ints, random

H200 = 132
HEADS = Heads(num_heads=12, num_kv_heads=2, head_dim=128)
SIZES = [16, 64, 128, 256, 512, 640, 1024]


def attention(heads: Heads = HEADS, *, by_hopper: bool) -> PrefillAttention:
    made = PrefillAttention(heads, HALF, BLOCK, DEVICE)
    rows = PREFILL[0 if by_hopper else 1 :]
    made.kernels = [Usable(row.smallest, row.build(DEVICE, heads, HALF, BLOCK)) for row in rows]
    return made


@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 512, 2700, 8192])
def test_without_the_hopper_kernel_tiles_are_the_plain_one_s(tokens: int) -> None:
    expected = choose_rows(tokens, 12, decode_triton.num_sms(DEVICE))
    assert attention(by_hopper=False).rows(tokens) == expected


@pytest.mark.parametrize(("tokens", "rows"), [(16, 64), (128, 64), (129, ROWS), (512, ROWS), (8192, ROWS)])
def test_with_it_few_tokens_get_small_tiles_and_others_its_own(tokens: int, rows: int) -> None:
    assert attention(by_hopper=True).rows(tokens) == rows


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "num_sms", lambda device: H200)


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize("by_hopper", [False, True])
def test_what_is_short_grows_with_the_tokens_of_a_pass_and_ends_where_tiles_no_longer_fit(by_hopper: bool) -> None:
    attend = attention(by_hopper=by_hopper)
    maximum = [max([n for n in range(0, 4000, 16) if attend.is_short(tokens, [n])], default=0) for tokens in SIZES]
    assert maximum[:-1] == sorted(maximum[:-1])
    assert all(tokens <= keys for tokens, keys in zip(SIZES[:-1], maximum, strict=False)), "an empty past is short"
    assert maximum[-1] == 0


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(("tokens", "maximum"), [(16, 448), (128, 448), (256, 1024), (384, 2304), (640, 2304)])
def test_few_tokens_behind_a_context_that_is_short_for_many_go_the_long_way(tokens: int, maximum: int) -> None:
    attend = attention(by_hopper=True)
    assert attend.is_short(tokens, [maximum])
    assert not attend.is_short(tokens, [maximum + 1])


@pytest.mark.usefixtures("on_h200")
def test_more_heads_than_a_wave_of_programs_holds_are_never_short() -> None:
    assert not attention(Heads(32, 8, 128), by_hopper=True).is_short(512, [512])


@pytest.mark.parametrize("by_hopper", [False, True])
@pytest.mark.parametrize("tokens", SIZES)
def test_short_passes_have_small_tiles(tokens: int, by_hopper: bool) -> None:
    assert attention(by_hopper=by_hopper).rows(tokens, is_short=True) == 64


@pytest.mark.parametrize("is_short", [False, True])
def test_the_short_way_gives_what_the_long_one_does(is_short: bool) -> None:
    paged, q = Paged.of([40, 300], kv_heads=2, dim=64, dtype=HALF), random(90, 4, 64, dtype=HALF)
    attend = attention(Heads(4, 2, 64), by_hopper=False)
    tiles = Tiles.of([20, 70], attend.rows(90, is_short=is_short), DEVICE, seq_lens=[40, 300])
    splits = 1 if is_short else None
    found = attend(q, paged.k, paged.v, paged.tables, ints([40, 300]), tiles, 0.2, splits=splits)
    assert_close(found, paged.expected(q, [20, 70]))


@pytest.mark.parametrize(("rows", "by_hopper", "expected"), [(64, True, 0), (ROWS, True, 1), (ROWS, False, 0)])
def test_its_own_tiles_go_to_it_and_all_others_to_the_plain_kernel(
    rows: int, by_hopper: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged, q, calls = Paged.of([40], kv_heads=2, dim=128, dtype=HALF), random(20, 12, 128, dtype=HALF), []

    def hopper(q: Tensor, *rest: object, **_: object) -> Tensor:
        calls.append(rest)
        return paged.expected(q, [20])

    monkeypatch.setattr(prefill_hopper, "hopper_prefill", hopper)
    tiles = Tiles.of([20], rows, DEVICE, seq_lens=[40])
    found = attention(by_hopper=by_hopper)(q, paged.k, paged.v, paged.tables, ints([40]), tiles, 0.2)
    assert len(calls) == expected
    assert_close(found, paged.expected(q, [20]))


@pytest.mark.parametrize(
    ("dim", "dtype", "block_size", "expected"),
    [
        (128, torch.bfloat16, 16, True),
        (128, torch.bfloat16, 64, True),
        (128, torch.bfloat16, 8, False),
        (128, torch.float16, 16, False),
        (256, torch.bfloat16, 16, False),
        (64, torch.bfloat16, 16, False),
    ],
    ids=str,
)
def test_heads_and_blocks_it_is_not_made_for_go_another_way(
    dim: int, dtype: torch.dtype, block_size: int, expected: bool
) -> None:
    assert suits(dim, dtype, block_size) is expected


def test_a_device_that_is_no_hopper_gpu_never_tries_it() -> None:
    assert len(PrefillAttention(HEADS, torch.bfloat16, BLOCK, torch.device("cpu")).kernels) == 1


def test_a_kernel_that_fails_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(prefill_hopper, "hopper_prefill", fail)
    monkeypatch.setattr(registry, "gpu_of", lambda device: Gpu(H200, HOPPER, 227 << 10))
    monkeypatch.setattr(PREFILL[0].choice, "decided", {})
    with caplog.at_level(logging.WARNING):
        assert len(PrefillAttention(Heads(2, 1, 128), torch.bfloat16, BLOCK, DEVICE).kernels) == 1
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize("tokens", range(1, 2000, 61))
def test_splits_fill_the_device_once_where_they_are_more_than_a_few(tokens: int) -> None:
    splits, programs = choose_splits(tokens, 12, H200), 12 * -(-tokens // ROWS)
    if programs * 4 > H200:
        assert splits == 1
    else:
        assert 4 <= splits <= MAX_SPLITS
        assert programs * splits <= H200 < programs * (splits + 1)


@pytest.mark.parametrize(("tokens", "splits", "programs"), [(96, 2, 48), (224, 2, 48), (352, 1, 36), (640, 1, 60)])
def test_beside_others_prompts_take_no_more_than_half_of_the_multiprocessors(
    tokens: int, splits: int, programs: int
) -> None:
    made = attention(by_hopper=True)
    made._num_sms = H200
    assert made.half(tokens) == (splits, programs)


def test_parts_are_added_up_by_their_levels_and_finished_rows_left_alone() -> None:
    """Three splits: one row all have keys for, one that two have, one that is written already."""
    scores, values = random(3, 3, 4), random(3, 3, 4, 16)  # [splits, rows, keys a split]
    level = scores.amax(-1) + 5
    weights = torch.exp2(scores - level[..., None])
    mixed, sums = (weights[..., None] * values).sum(-2), weights.sum(-1)
    active = ints([3, 2, 0])
    for split in range(3):
        mixed[split, active <= split] = float("nan")
    out = random(3, 1, 16)
    expected = out.clone()
    for row, count in enumerate(active.tolist()[:2]):
        seen = torch.exp2(scores[:count, row]).flatten()
        expected[row, 0] = (seen[:, None] * values[:count, row].flatten(0, 1)).sum(0) / seen.sum()
    combine(Partials(mixed[:, :, None].contiguous(), level[..., None].contiguous(), sums[..., None], active), out)
    assert_close(out, expected)
