"""How attention over packed pictures is shared out to a program on each multiprocessor. Made on the host, once a pass.

An item is one head's tile of 192 rows and the keys it looks at: all of its picture's, where it is whole. Programs get
as many whole tiles as fit into the same time for all, and tiles that are left are cut by keys to fill what is free:

    program 0   | tile 0 ...... | tile 3 ...... | 6: some keys |
    program 1   | tile 1 ...... | tile 4 ...... | 6: the rest  |      without: | tile 6 ...... | and two programs idle
    program 2   | tile 2 ...... | tile 5 ...... | 7 .......... |

What a part finds is kept in a slot of its own until `vit_sums` adds the parts up. Knows rows and keys, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.torch_utils import to_device

GROUP_ROWS, TILE_ROWS, KEYS = 64, 192, 64  # rows of four warps and of a tile; keys of a tile
ITEM, SPLIT = 8, 5  # numbers of each
# An item: first row, rows, head; first row and length of its picture; first tile of keys, tiles; slot, or -1
# Time, in twentieths of what a tile of keys takes a full tile of rows: with one, two and three groups of rows; to begin
# and to end an item; to launch what adds up parts, and for every tile of those.
_KEY_COSTS, _ITEM_COST, _SUM_COST, _SUM_TILE_COST = (11, 16, 20), 60, 100, 2
_FEW_TILES = 3  # of a program: only then smaller ones may fill the device better


@dataclass(frozen=True, eq=False)
class TileSchedule:
    offsets: Tensor  # int32 [programs + 1]: where the items of a program begin, and the end
    splits: Tensor  # int32 [1 + SPLIT * n]: how many tiles are cut; first row, rows, head, first slot, parts of each
    items: Tensor  # int32 [items, ITEM]: first row, rows, head; the picture's first row and length; keys, slot
    slots: int  # that are written to

    @property
    def programs(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int, programs: int, device: torch.device) -> TileSchedule:
        plan = make_schedule(tuple(lengths), heads, programs)
        return cls.among(to_device(plan.metadata, device), programs, plan.slots)

    @classmethod
    def among(cls, metadata: Tensor, programs: int, slots: int) -> TileSchedule:
        """Laid out as `Plan.metadata`."""
        at = items_at(programs)
        return cls(metadata[: programs + 1], metadata[programs + 1 : at], metadata[at:].view(-1, ITEM), slots)


class Plan(NamedTuple):
    metadata: Tensor  # int32, on the host: offsets, splits, items
    slots: int


def items_at(programs: int) -> int:
    """Where the items begin in the numbers of a plan: there are never more tiles to cut than programs."""
    return -(-(programs + 2 + SPLIT * programs) // ITEM) * ITEM


def max_slots(programs: int) -> int:
    """More parts would take more memory, and leave little to win: then almost every tile of a last wave is cut."""
    return programs * 5 // 4


@lru_cache(maxsize=64)  # pictures of one camera have one size
def make_schedule(lengths: tuple[int, ...], heads: int, programs: int) -> Plan:
    tiles = _Tiles.of(lengths, heads, TILE_ROWS)
    choices = [_share(tiles, programs)]
    if len(tiles.items) < _FEW_TILES * programs:
        choices.append(_share(_Tiles.of(lengths, heads, TILE_ROWS - GROUP_ROWS), programs))
    return _plan(min(choices, key=lambda choice: choice.cost), programs)


class _Tiles(NamedTuple):
    """All tiles, those that take longest first."""

    items: Tensor  # [n, ITEM], as if they were whole
    classes: list[tuple[int, int]]  # what tiles cost, and how many cost so much

    @classmethod
    def of(cls, lengths: tuple[int, ...], heads: int, tile_rows: int) -> _Tiles:
        length = torch.tensor(lengths)
        cut = -(-length // tile_rows)
        image = torch.repeat_interleave(cut * heads)
        begin, cut, start, length = torch.stack(
            ((cut * heads).cumsum(0) - cut * heads, cut, length.cumsum(0) - length, length)
        )[:, image]
        place = torch.arange(len(image)) - begin
        head, first = place // cut, place % cut * tile_rows
        rows, keys = (length - first).clamp(max=tile_rows), -(-length // KEYS)
        costs, order = (keys * torch.tensor(_KEY_COSTS)[(rows - 1) // GROUP_ROWS] + _ITEM_COST).sort(
            descending=True, stable=True
        )
        none = torch.zeros_like(head)
        items = torch.stack((start + first, rows, head, start, length, none, keys, none - 1), 1)[order]
        found, counts = torch.unique_consecutive(costs, return_counts=True)
        return cls(items, list(zip(found.tolist(), counts.tolist(), strict=True)))


class _Part(NamedTuple):
    program: int
    tile: list[int]  # an item
    first: int  # tile of keys
    length: int  # in tiles of keys


class _Choice(NamedTuple):
    cost: int
    tiles: _Tiles
    owners: list[int]  # the program of each tile, or -1
    parts: list[_Part]  # of the others


def _share(tiles: _Tiles, programs: int) -> _Choice:
    """Whole tiles alone, unless cutting the last ones saves more than adding up costs."""
    owners, loads = _place(tiles.classes, programs, None)
    whole = _Choice(max(loads), tiles, owners, [])
    least, step = -(-sum(cost * count for cost, count in tiles.classes) // programs), _KEY_COSTS[-1] // 2
    limit = least + _ITEM_COST + step
    while limit + _SUM_COST < whole.cost:
        owners, loads = _place(tiles.classes, programs, limit)
        left = tiles.items[[i for i, owner in enumerate(owners) if owner < 0]].tolist()
        parts = _cut(left, [limit - load for load in loads])
        if parts is not None:
            cost = limit + _SUM_COST + len(left) * _SUM_TILE_COST
            is_better = cost < whole.cost and len(parts) <= max_slots(programs)
            return _Choice(cost, tiles, owners, parts) if is_better else whole
        limit, step = limit + step, 2 * step
    return whole


def _place(classes: list[tuple[int, int]], programs: int, limit: int | None) -> tuple[list[int], list[int]]:
    """The program of each tile: always one that has least to do, or -1 where that would exceed the limit.

    Programs that have as much to do as each other are served together. Returns what each has to do, too.
    """
    owners: list[int] = []
    equals = [(0, 0, list(range(programs)))]  # a heap: what they have to do, a number against ties, who
    for cost, count in classes:
        end = len(owners) + count
        while len(owners) < end and (limit is None or equals[0][0] + cost <= limit):
            load, _, who = heappop(equals)
            some, others = who[: end - len(owners)], who[end - len(owners) :]
            owners += some
            heappush(equals, (load + cost, len(owners), some))
            if others:
                heappush(equals, (load, 0, others))
        owners += [-1] * (end - len(owners))
    loads = [0] * programs
    for load, _, who in equals:
        for program in who:
            loads[program] = load
    return owners, loads


def _cut(tiles: list[list[int]], free: list[int]) -> list[_Part] | None:
    """Tiles cut by keys into what is free of each program; None where that is not enough."""
    parts: list[_Part] = []
    program = 0
    for tile in tiles:
        cost, first, keys = _KEY_COSTS[(tile[1] - 1) // GROUP_ROWS], 0, tile[6]
        while first < keys:
            if program == len(free):
                return None
            count = min(keys - first, (free[program] - _ITEM_COST) // cost)
            if count > 0:
                parts.append(_Part(program, tile, first, count))
                free[program] -= _ITEM_COST + count * cost
                first += count
            if first < keys:
                program += 1
    return parts


def _plan(choice: _Choice, programs: int) -> Plan:
    items, splits = _slots(choice.parts)
    owners = torch.tensor([owner for owner in choice.owners if owner >= 0] + [part.program for part in choice.parts])
    placed = choice.tiles.items
    if items:
        placed = torch.cat((placed[torch.tensor(choice.owners) >= 0], torch.tensor(items).view(-1, ITEM)))
    metadata = torch.zeros(items_at(programs) + placed.numel(), dtype=torch.int32)
    metadata[1 : programs + 1] = torch.bincount(owners, minlength=programs).cumsum(0)
    table = torch.tensor([len(splits), *(number for split in splits for number in split)])
    metadata[programs + 1 : programs + 1 + len(table)] = table
    metadata[items_at(programs) :] = placed[owners.argsort(stable=True)].flatten()
    return Plan(metadata, sum(split[-1] for split in splits))


def _slots(parts: list[_Part]) -> tuple[list[int], list[list[int]]]:
    """Numbers of the items of parts, and the tiles that were cut, as in `TileSchedule`."""
    items: list[int] = []
    splits: list[list[int]] = []
    slots = 0
    for part in parts:
        is_whole = part.length == part.tile[6]
        items += [*part.tile[:5], part.first, part.length, -1 if is_whole else slots]
        if is_whole:
            continue
        if part.first == 0:
            splits.append([*part.tile[:3], slots, 0])
        splits[-1][-1] += 1
        slots += 1
    return items, splits
