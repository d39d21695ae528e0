"""Qwen2.5-VL: Qwen2-VL's tower with RMS norms, gated MLPs and window attention in all but a few layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.errors import ConfigError
from saccade.models.families import qwen2_vl
from saccade.models.families.qwen2_vl import Qwen2VL, vision_theta
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks
from saccade.models.vision.blocks import all_cells, grid_positions, reorder
from saccade.models.weights import Rule
from saccade.types.media import Grid
from saccade.util.torch_utils import to_device


class Qwen2_5VL(Qwen2VL):
    def make_tower(self, params: Parameters, vision: VisionConfig) -> Tower:
        return Tower(params, vision, self.config.text.hidden_size, vision_theta(self.config))

    def tower_rules(self) -> tuple[Rule, ...]:
        names = {"gate_proj": "up.gate", "up_proj": "up.up", "down_proj": "down"}
        mlp = (Rule(f"blocks.{{}}.mlp.{name}.*", f"blocks.{{}}.{ours}.*") for name, ours in names.items())
        return (*qwen2_vl.COMMON_TOWER_RULES, *mlp, *qwen2_vl.MERGER_RULES)


class Tower(qwen2_vl.Tower):
    """Inside the tower tokens are ordered window by window, so that a window is a run of rows."""

    norm = RMSNorm

    def __init__(self, params: Parameters, vision: VisionConfig, outputs: int, theta: float) -> None:
        self.window = _window_side(vision)
        self.full_layers = frozenset(vision.full_layers)
        super().__init__(params, vision, outputs, theta)

    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: VisionOps) -> Encoding:
        device = patches.device
        packing = pack(tuple(grids), self.merge, self.window)
        order, back = to_device(packing.orders, device)
        positions = grid_positions(grids, self.head_dim, self.theta, self.merge, device, packing.cells)
        inside_windows = ops.begin(packing.windows, positions, device)
        inside_frames = ops.begin(packing.frames, positions, device)
        x = reorder(self.patch(patches), order, self.merge)
        del patches  # or they would stay alive until the last layer
        for is_full, layers in groupby(range(len(self.blocks)), self.full_layers.__contains__):
            run = inside_frames if is_full else inside_windows
            x = yield from run_blocks(run, [self.blocks[layer] for layer in layers], x)
        return self.split(self.merger(x).index_select(0, back), grids)


def _window_side(vision: VisionConfig) -> int:
    side = vision.window_tokens
    if not side:
        raise ConfigError(
            f"vision_config: window_size={vision.window_size} and fullatt_block_indexes must both be given, "
            f"and a window must hold a token of {vision.patch_size * vision.spatial_merge_size} pixels"
        )
    return side


class Windows(NamedTuple):
    """Tokens by window, for example with window sides of 2 (numbers are tokens, letters windows):

    0 1 | 2      a a | b
    3 4 | 5      a a | b      order 0 1 3 4 2 5 6 7 8, tokens 4 2 2 1
    ----+--      ----+--
    6 7 | 8      c c | d
    """

    order: npt.NDArray[np.int32]  # the token at each row
    tokens: npt.NDArray[np.int64]  # of each window, none of them empty


class Packing(NamedTuple):
    """Metadata of packed images, on the CPU."""

    orders: Tensor  # int32 [2, tokens]: the token at each row, and the row of each token
    cells: Tensor  # int16 [patches, 2]: row and column of each, window by window
    windows: tuple[int, ...]  # patches of each
    frames: tuple[int, ...]


@lru_cache(maxsize=8)  # images of one camera share a grid
def pack(grids: tuple[Grid, ...], merge: int, side: int) -> Packing:
    windows = all_windows(grids, merge, side)
    order = torch.from_numpy(windows.order)
    orders = torch.stack((order, order.argsort().int()))
    inside = tuple((windows.tokens * merge**2).tolist())
    cells = reorder(all_cells(grids, merge), order, merge)
    return Packing(orders, cells, inside, tuple(qwen2_vl.frame_lengths(grids)))


def all_windows(grids: Sequence[Grid], merge: int, side: int) -> Windows:
    """Windows of packed images. No window crosses a frame."""
    frames = [frame_windows(grid.h // merge, grid.w // merge, side) for grid in grids for _ in range(grid.t)]
    starts = np.cumsum([0, *(len(frame.order) for frame in frames[:-1])])
    order = np.concatenate([frame.order + start for frame, start in zip(frames, starts, strict=True)])
    return Windows(order.astype(np.int32), np.concatenate([frame.tokens for frame in frames]))


@lru_cache(maxsize=64)
def frame_windows(height: int, width: int, side: int) -> Windows:
    rows, columns = np.indices((height, width)) // side
    window = (rows * -(-width // side) + columns).ravel()  # [tokens]: the window each belongs to
    return Windows(np.argsort(window, kind="stable").astype(np.int32), np.bincount(window))
