"""Who works on what in attention over pictures: everything once, nobody for long, and parts add up to the whole."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from saccade.kernels.attention.vit_schedule import (
    GROUP_ROWS,
    ITEM,
    KEYS,
    SPLIT,
    TILE_ROWS,
    TileSchedule,
    make_schedule,
    max_slots,
)
from saccade.models.layers.torch_attention import packed_attention
from tests.helpers.kernels.vit_attention import attend

CPU = torch.device("cpu")
PACKINGS = [[64], [1], [300, 257], [1564], [1564] * 2, [1800], [900, 64, 1564, 200], [2048]]


def items_of(lengths: list[int], heads: int, programs: int) -> list[list[int]]:
    return TileSchedule.of(lengths, heads, programs, CPU).items.tolist()


@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_every_row_meets_every_tile_of_keys_of_its_image_once(lengths: list[int]) -> None:
    heads, seen = 4, Counter[tuple[int, ...]]()
    for row, rows, head, start, length, first, count, _ in items_of(lengths, heads, 33):
        assert rows <= TILE_ROWS and row + rows <= start + length
        seen.update(product(range(row, row + rows), [head], [start], [length], range(first, first + count)))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    expected = Counter[tuple[int, ...]]()
    for start, length in zip(starts, lengths, strict=True):
        tiles = range(-(-length // KEYS))
        expected.update(product(range(start, start + length), range(heads), [start], [length], tiles))
    assert seen == expected


@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_parts_of_a_tile_lie_in_slots_of_their_own_side_by_side(lengths: list[int]) -> None:
    schedule = TileSchedule.of(lengths, 16, 132, CPU)
    found = sorted((item[7], *item[:3]) for item in schedule.items.tolist() if item[7] >= 0)
    splits = schedule.splits[1 : 1 + SPLIT * int(schedule.splits[0])].view(-1, SPLIT).tolist()
    assert found == [(slot + i, row, rows, head) for row, rows, head, slot, parts in splits for i in range(parts)]
    assert len(found) == schedule.slots <= max_slots(132)
    assert all(parts > 1 for *_, parts in splits)


@pytest.mark.parametrize("lengths", [[1564], [4784], [4784] * 2, [4784] * 3, [1564] * 8, [10764]], ids=str)
def test_no_program_has_much_more_to_do_than_others_would_have_if_all_had_the_same(lengths: list[int]) -> None:
    schedule = TileSchedule.of(lengths, 16, 132, CPU)
    groups = -(-schedule.items[:, 1] // GROUP_ROWS)
    work = (schedule.items[:, 6] * (2 + groups)).cumsum(0)[schedule.offsets[1:].long() - 1]
    assert work.diff().max() < 1.05 * work[-1] / 132 + 10


def test_whole_waves_are_not_cut() -> None:
    schedule = TileSchedule.of([TILE_ROWS * 33], 16, 132, CPU)
    assert schedule.slots == 0 and len(schedule.items) == 16 * 33
    assert (schedule.offsets.diff() == 4).all()


def test_a_plan_is_made_once_for_images_of_the_same_sizes() -> None:
    assert make_schedule((1564,), 16, 132) is make_schedule((1564,), 16, 132)


@pytest.mark.parametrize(("lengths", "programs"), [([1500], 7), ([1000, 1400], 11), ([1300], 6)])
def test_parts_add_up_to_attention_over_all_keys(lengths: list[int], programs: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 1, 72)
    schedule = TileSchedule.of(lengths, 1, programs, CPU)
    assert schedule.slots > 1
    expected = packed_attention(*qkv.unbind(1), lengths, 0.3)
    torch.testing.assert_close(attend(schedule, qkv, 0.3), expected, atol=1e-5, rtol=1e-4)


def test_items_that_a_recording_has_room_for_are_read_from_where_they_lie() -> None:
    plan = make_schedule((1500,), 1, 7)
    metadata = torch.cat((plan.metadata, torch.zeros(5 * ITEM, dtype=torch.int32)))
    schedule = TileSchedule.view_of(metadata, 7, plan.slots)
    assert schedule.items.data_ptr() >= metadata.data_ptr()
    assert len(schedule.items) == 5 + int(schedule.offsets[-1])
