"""Which kernel attends for new tokens, and how keys are shared out. The Hopper kernel itself is tried on its device."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.kernels.attention import decode_hopper, decode_triton, registry
from saccade.kernels.attention.decode import DecodeAttention
from saccade.kernels.attention.decode_hopper import suits
from saccade.kernels.attention.decode_hopper_schedule import KEYS, TileSchedule, plan_schedule
from saccade.kernels.attention.decode_triton import DecodeWorkspace
from saccade.kernels.attention.registry import DECODE, Usable
from saccade.kernels.launch.device import HOPPER, Gpu, Heads, num_sms
from tests.helpers.kernels.paged import BLOCK, DEVICE, HALF, Paged, assert_close, ints, random

HEADS = Heads(num_heads=12, num_kv_heads=2, head_dim=128)
Tile = tuple[int, int, int]  # request, head, number


def all_tiles(seq_lens: list[int], heads: int) -> list[Tile]:
    return [
        (request, head, tile)
        for request, seq_len in enumerate(seq_lens)
        for head in range(heads)
        for tile in range(-(-seq_len // KEYS))
    ]


def sections(schedule: TileSchedule, tiles: list[Tile]) -> list[list[list[Tile]]]:
    """Of each program the tiles of its first section and of its second."""
    found = []
    for metadata in schedule.metadata.tolist():
        pair = []
        for request, head, tile, count in (metadata[:4], metadata[4:8]):
            start = tiles.index((request, head, tile)) if count else 0
            pair.append(tiles[start : start + count])
        found.append(pair)
    return found


contexts_of_a_step = st.builds(
    lambda seq_lens, padding: seq_lens + [0] * padding,
    st.lists(st.sampled_from([1, 64, 65, 700, 2000]) | st.integers(1, 3000), min_size=1, max_size=9),
    st.integers(0, 7),
)


@settings(max_examples=25, deadline=None)
@given(contexts_of_a_step, st.sampled_from([1, 2, 4]), st.sampled_from([1, 5, 40]))
def test_programs_have_all_tiles_between_them_and_none_has_two_more_than_another(
    seq_lens: list[int], heads: int, programs: int
) -> None:
    tiles = all_tiles(seq_lens, heads)
    schedule = [first + second for first, second in sections(plan_schedule(ints(seq_lens), heads, programs), tiles)]
    assert sorted(tile for share in schedule for tile in share) == tiles
    assert max(map(len, schedule)) - min(map(len, schedule)) <= 1


@settings(max_examples=25, deadline=None)
@given(contexts_of_a_step, st.sampled_from([1, 2, 4]), st.sampled_from([3, 5, 40]))
def test_what_others_go_on_with_comes_first(seq_lens: list[int], heads: int, programs: int) -> None:
    """So the second section, if there is one, ends with the last tile of a request and head."""
    tiles = all_tiles(seq_lens, heads)
    ends = {(request, head): tile for request, head, tile in tiles}
    for first, second in sections(plan_schedule(ints(seq_lens), heads, programs), tiles):
        if second:
            assert first[0][2] == 0 and first[-1][2] < ends[first[-1][:2]], "a beginning without its end"
            assert second[-1][2] == ends[second[-1][:2]]


def test_rows_of_padding_have_no_tiles() -> None:
    """A tile that only writes zeros takes longer than one of keys, and the last programs would have all of them."""
    metadata = plan_schedule(ints([KEYS * 4, *[0] * 7]), 2, 4).metadata
    assert [row[3] + row[7] for row in metadata.tolist()] == [2, 2, 2, 2]
    assert not plan_schedule(ints([0] * 16), 2, 4).metadata[:, [3, 7, 8, 9]].any(), "a step of nobody"


def test_a_program_learns_how_shares_were_cut() -> None:
    metadata = plan_schedule(ints([KEYS * 7]), 1, 3).metadata
    assert metadata[:, 8:].tolist() == [[2, 1]] * 3  # two tiles each, and one share has one more


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "block_size", "expected"),
    [
        (128, 6, torch.bfloat16, 16, True),
        (128, 7, torch.float16, 64, True),
        (128, 1, torch.bfloat16, 16, True),
        (128, 32, torch.bfloat16, 16, False),
        (256, 6, torch.bfloat16, 16, True),
        (64, 6, torch.bfloat16, 16, False),
        (128, 6, torch.float32, 16, False),
        (128, 6, torch.bfloat16, 8, False),
    ],
    ids=str,
)
def test_heads_and_blocks_it_is_not_made_for_go_another_way(
    dim: int, group: int, dtype: torch.dtype, block_size: int, expected: bool
) -> None:
    assert suits(dim, group, dtype, block_size) is expected


CASE = (DEVICE, HEADS, HALF, BLOCK, None)


def attention(*, by_hopper: bool) -> DecodeAttention:
    made = DecodeAttention(HEADS, HALF, BLOCK, 64, DEVICE)
    made.kernels = [Usable(row.smallest, row.build(*CASE)) for row in DECODE[0 if by_hopper else 1 :]]
    return made


@pytest.mark.parametrize(("requests", "by_hopper", "expected"), [(2, True, 0), (20, True, 1), (20, False, 0)])
def test_many_requests_go_to_it_and_few_to_the_plain_kernel(
    requests: int, by_hopper: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged, q = Paged.of([5] * requests, kv_heads=2, dim=128, dtype=HALF), random(requests, 12, 128, dtype=HALF)
    found, calls = paged.expected(q, [1] * requests), []

    def hopper(*given: object, **_: object) -> Tensor:
        calls.append(given)
        return found

    monkeypatch.setattr(decode_hopper, "hopper_decode", hopper)
    attend, seq_lens, new = attention(by_hopper=by_hopper), ints(paged.seq_lens), paged.new_tokens(q)
    out = attend(new, paged.k, paged.v, paged.tables, seq_lens, 0.2, attend.plan(seq_lens))
    assert len(calls) == expected
    assert_close(out, found)


def test_a_device_that_is_no_hopper_gpu_never_tries_it() -> None:
    assert len(DecodeAttention(HEADS, torch.bfloat16, BLOCK, 64, torch.device("cpu")).kernels) == 1


def test_a_kernel_that_fails_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(decode_hopper, "hopper_decode", fail)
    monkeypatch.setattr(registry, "gpu_of", lambda device: Gpu(132, HOPPER, 227 << 10))
    monkeypatch.setattr(DECODE[0].choice, "decided", {})
    with caplog.at_level(logging.WARNING):
        assert len(DecodeAttention(Heads(2, 1, 128), HALF, BLOCK, 64, DEVICE).kernels) == 1
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize("norm_eps", [None, 1e-6])
def test_the_trial_accepts_what_agrees_with_the_plain_kernel(
    norm_eps: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain kernel in its place: the trial's own example must be one that a right kernel passes."""

    def plain(*given: Any, schedule: TileSchedule, **options: Any) -> Tensor:
        return decode_triton.paged_decode(*given, **options)

    monkeypatch.setattr(decode_hopper, "hopper_decode", plain)
    choice = DECODE[0].choice
    assert choice is not None
    choice.self_test(DEVICE, Heads(2, 1, 128), HALF, BLOCK, norm_eps)


@pytest.mark.parametrize(("taken", "programs"), [(0, 12), (4, 8), (6, 6), (7, 12)])
def test_beside_others_it_has_the_multiprocessors_they_leave_or_comes_after_them(taken: int, programs: int) -> None:
    made = attention(by_hopper=True)
    made._programs = 12
    planned = made.plan(ints([100] * 16), taken)
    assert isinstance(planned, partial) and len(planned.keywords["schedule"].metadata) == programs


def test_the_workspace_has_room_for_two_parts_of_every_program() -> None:
    made = DecodeWorkspace.allocate(1, 12, 1, 128, DEVICE)
    programs = num_sms(DEVICE)
    assert made.mixed.numel() >= 2 * programs * 12 * 128
    assert made.maxima.numel() == made.sums.numel() >= 2 * programs * 12
