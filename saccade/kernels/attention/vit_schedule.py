"""Schedules vision attention over packed images: work items for a program on each SM. On the CPU, once per pass.

An item is one head's tile of 192 rows and the keys it attends to: all of its image's, unless the tile is split.
Programs get as many whole tiles as fit into the same time for all; the tiles left over are split by keys to fill what
is free:

    program 0   | tile 0 ...... | tile 3 ...... | 6: some keys |
    program 1   | tile 1 ...... | tile 4 ...... | 6: the rest  |      without: | tile 6 ...... | and two programs idle
    program 2   | tile 2 ...... | tile 5 ...... | 7 .......... |

The partial result of a part goes to a slot of its own; `vit_combine` combines them. Knows rows and keys, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.util.torch_utils import to_device

GROUP_ROWS = 64  # rows of four warps
TILE_ROWS = 192
KEYS = 64  # of a tile
ITEM = 8  # integers: first row, rows, head; first row and length of its image; first tile of keys, tiles; slot, or -1
SPLIT = 5  # integers of a tile that is split: first row, rows, head; first slot, parts
# Measured costs, in twentieths of the time that a tile of keys takes with a full tile of rows.
_KEY_COSTS = (11, 16, 20)  # a tile of keys with one, two and three groups of rows
_ITEM_COST = 60  # prologue and epilogue
_COMBINE_COST = 100  # its launch
_COMBINE_TILE_COST = 2
_FEW_TILES = 3  # per program: only then may smaller tiles fill the device better


@dataclass(frozen=True, eq=False)
class TileSchedule:
    offsets: Tensor  # int32 [programs + 1]: where the items of a program begin, and the end
    splits: Tensor  # int32 [1 + SPLIT * n]: how many tiles are split, and these
    items: Tensor  # int32 [items, ITEM]
    slots: int  # partial results

    @property
    def programs(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int, programs: int, device: torch.device) -> TileSchedule:
        plan = make_schedule(tuple(lengths), heads, programs)
        return cls.view_of(to_device(plan.metadata, device), programs, plan.slots)

    @classmethod
    def view_of(cls, metadata: Tensor, programs: int, slots: int) -> TileSchedule:
        """Laid out as `Plan.metadata`."""
        at = items_at(programs)
        return cls(metadata[: programs + 1], metadata[programs + 1 : at], metadata[at:].view(-1, ITEM), slots)


class Plan(NamedTuple):
    metadata: Tensor  # int32, on the CPU: offsets, splits, items
    slots: int


def items_at(programs: int) -> int:
    """Where items begin in the metadata of a plan: at most as many tiles are split as there are programs."""
    return -(-(programs + 2 + SPLIT * programs) // ITEM) * ITEM


def max_slots(programs: int) -> int:
    """Limits memory. With more parts almost every tile of the last wave would be split, and little gained."""
    return programs * 5 // 4


@lru_cache(maxsize=64)  # images of one camera have one size
def make_schedule(lengths: tuple[int, ...], heads: int, programs: int) -> Plan:
    tiles = _Tiles.of(lengths, heads, TILE_ROWS)
    choices = [_assign(tiles, programs)]
    if len(tiles.items) < _FEW_TILES * programs:
        choices.append(_assign(_Tiles.of(lengths, heads, TILE_ROWS - GROUP_ROWS), programs))
    return _plan(min(choices, key=lambda choice: choice.cost), programs)


class _Tiles(NamedTuple):
    """All tiles, the most costly first."""

    items: Tensor  # [n, ITEM], not split
    classes: list[tuple[int, int]]  # a cost, and how many tiles have it

    @classmethod
    def of(cls, lengths: tuple[int, ...], heads: int, tile_rows: int) -> _Tiles:
        length = torch.tensor(lengths)
        cut = -(-length // tile_rows)
        image = torch.repeat_interleave(cut * heads)
        begin, cut, start, length = torch.stack(
            ((cut * heads).cumsum(0) - cut * heads, cut, length.cumsum(0) - length, length)
        )[:, image]
        index = torch.arange(len(image)) - begin
        head = index // cut
        first = index % cut * tile_rows
        rows = (length - first).clamp(max=tile_rows)
        keys = -(-length // KEYS)
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


def _assign(tiles: _Tiles, programs: int) -> _Choice:
    """Whole tiles alone, unless splitting the last ones saves more than the combine costs."""
    owners, loads = _assign_whole(tiles.classes, programs, None)
    whole = _Choice(max(loads), tiles, owners, [])
    average = -(-sum(cost * count for cost, count in tiles.classes) // programs)
    step = _KEY_COSTS[-1] // 2
    limit = average + _ITEM_COST + step
    while limit + _COMBINE_COST < whole.cost:
        owners, loads = _assign_whole(tiles.classes, programs, limit)
        left = tiles.items[[i for i, owner in enumerate(owners) if owner < 0]].tolist()
        parts = _split(left, [limit - load for load in loads])
        if parts is not None:
            cost = limit + _COMBINE_COST + len(left) * _COMBINE_TILE_COST
            is_better = cost < whole.cost and len(parts) <= max_slots(programs)
            return _Choice(cost, tiles, owners, parts) if is_better else whole
        limit += step
        step *= 2
    return whole


def _assign_whole(classes: list[tuple[int, int]], programs: int, limit: int | None) -> tuple[list[int], list[int]]:
    """The program of each tile: always one with the least load, or -1 where that would exceed the limit.

    Programs with the same load are served together. Returns the load of each program, too.
    """
    owners: list[int] = []
    equals = [(0, 0, list(range(programs)))]  # a heap: load, a number against ties, the programs that have it
    for cost, count in classes:
        end = len(owners) + count
        while len(owners) < end and (limit is None or equals[0][0] + cost <= limit):
            load, _, idle = heappop(equals)
            some, others = idle[: end - len(owners)], idle[end - len(owners) :]
            owners += some
            heappush(equals, (load + cost, len(owners), some))
            if others:
                heappush(equals, (load, 0, others))
        owners += [-1] * (end - len(owners))
    loads = [0] * programs
    for load, _, equal in equals:
        for program in equal:
            loads[program] = load
    return owners, loads


def _split(tiles: list[list[int]], free: list[int]) -> list[_Part] | None:
    """Tiles split by keys into the free time of each program; None if that is not enough."""
    parts: list[_Part] = []
    program = 0
    for tile in tiles:
        cost = _KEY_COSTS[(tile[1] - 1) // GROUP_ROWS]
        first = 0
        keys = tile[6]
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
    table = torch.tensor([len(splits), *chain.from_iterable(splits)])
    metadata[programs + 1 : programs + 1 + len(table)] = table
    metadata[items_at(programs) :] = placed[owners.argsort(stable=True)].flatten()
    return Plan(metadata, sum(split[-1] for split in splits))


def _slots(parts: list[_Part]) -> tuple[list[int], list[list[int]]]:
    """The items of parts, one after the other, and the tiles that were split, as in `TileSchedule`."""
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
