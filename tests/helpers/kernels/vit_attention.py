"""Attention over images in parts, as a schedule cuts it, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.attention.vit_combine import CELL, combine
from saccade.kernels.attention.vit_schedule import (
    KEYS,
    TILE_ROWS,
    TileSchedule,
)


def attend(schedule: TileSchedule, qkv: Tensor, scale: float) -> Tensor:
    """What the kernel does with its items, and the parts added up."""
    _, _, heads, dim = qkv.shape
    out = torch.full((len(qkv), heads, dim), torch.nan)
    parts = torch.full((max(1, schedule.slots), TILE_ROWS, dim + CELL), torch.nan)
    for row, rows, head, start, length, first, count, slot in schedule.items[: schedule.offsets[-1]].tolist():
        lead = -(-length // KEYS) * KEYS - length  # what the first tile leaves to others
        order = torch.cat((torch.arange(length - KEYS + lead, length), torch.arange(length - KEYS + lead)))
        low = max(0, first * KEYS - lead)
        mine = start + order[low : (first + count) * KEYS - lead]
        q, (k, v) = qkv[row : row + rows, 0, head], (qkv[mine, i, head] for i in (1, 2))
        scores = q @ k.T * scale * 1.4426950408889634
        level = scores[:, :KEYS].amax(1) + 32
        weights = torch.exp2(scores - level[:, None])
        if slot < 0:
            out[row : row + rows, head] = weights @ v / weights.sum(1, keepdim=True)
        else:
            parts[slot, :rows, :dim] = weights @ v
            parts[slot, :rows, dim], parts[slot, :rows, dim + 1] = weights.sum(1), level
    if schedule.slots:
        combine(parts, schedule, out)
    return out
