"""Transformer blocks of vision towers, over the packed patches of any number of pictures. Knows no model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.checkpoint.config import ModelConfig, VisionConfig
from saccade.errors import ConfigError
from saccade.models.layers.attention import packed_attention
from saccade.models.layers.basic import (
    LayerNorm,
    Linear,
    RMSNorm,
    activation,
    cos_sin,
    frequencies,
    gated_activation,
    rotate,
)
from saccade.models.parameters import Parameters
from saccade.types import Grid


class RotaryCosSin(NamedTuple):
    """Rotary positions of packed patches."""

    cos: Tensor  # float32 [T, d]
    sin: Tensor


@dataclass(eq=False)
class PatchPositions:
    """Where packed patches stand, and what that turns."""

    cells: Tensor  # int16 [T, 2]: row and column of each, on the host; the same tensor for the same grids
    per_axis: Tensor  # float32, on the device: frequencies of both axes [d / 4], or of each [2, d / 4]
    rotary: Tensor | None = None  # what `fused_vision` made of them, for the next pass over the same

    def are(self, others: PatchPositions | None) -> bool:
        """Whether patches stand where others do, and turn as much; not every time that they do."""
        return others is not None and self.cells is others.cells and self.per_axis is others.per_axis


_ALIGNED = 8  # values of two bytes that are read at once; fast products want rows that are a multiple long

Norm = LayerNorm | RMSNorm


class VisionBlock:
    """Attention inside each picture, then an MLP; each works on a norm of its input and is added to it."""

    def __init__(
        self,
        params: Parameters,
        vision: VisionConfig,
        *,
        eps: float,
        is_qkv_fused: bool,
        norm: type[LayerNorm] | type[RMSNorm] = LayerNorm,
        has_bias: bool = True,
    ) -> None:
        hidden, wide = vision.hidden_size, vision.intermediate_size
        self.heads = vision.num_heads
        self.scale = (hidden // vision.num_heads) ** -0.5
        qkv = 3 * hidden if is_qkv_fused else {"q": hidden, "k": hidden, "v": hidden}
        self.attention_norm: Norm = norm(params.within("attention_norm"), hidden, eps)
        self.qkv = Linear(params.within("qkv"), hidden, qkv, bias=has_bias)
        self.out = Linear(params.within("out"), hidden, hidden, bias=has_bias)
        self.mlp_norm: Norm = norm(params.within("mlp_norm"), hidden, eps)
        up = {"gate": wide, "up": wide} if vision.is_gated else wide
        self.up = Linear(params.within("up"), hidden, up, bias=has_bias, pad_outputs=_ALIGNED)
        self.act = gated_activation(vision.hidden_act) if vision.is_gated else activation(vision.hidden_act)
        self.down = Linear(params.within("down"), wide, hidden, bias=has_bias, pad_inputs=_ALIGNED)

    def __call__(self, x: Tensor, lengths: Sequence[int], angles: RotaryCosSin | None = None) -> Tensor:
        x = self.attend(self.attention_norm(x), lengths, angles).add_(x)
        return self.down(self.act(self.up(self.mlp_norm(x)))).add_(x)

    def attend(self, x: Tensor, lengths: Sequence[int], angles: RotaryCosSin | None) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)  # [3, heads, T, d]
        # Attention gains more from heads that are contiguous than the copy costs; rotation makes the copy anyway.
        if angles is None:
            q, k, v = qkv.contiguous()
        else:
            q, k = rotate(qkv[:2].float(), *angles).to(x.dtype)  # in float32, as the towers were trained
            v = qkv[2].contiguous()
        mixed = packed_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), lengths, self.scale)
        return self.out(mixed.flatten(1))


def grid_positions(
    grids: Sequence[Grid],
    head_dim: int,
    theta: float,
    merge: int,
    device: torch.device,
    cells: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> PatchPositions:
    """Half of each head turns with a patch's row, half with its column. `cells`: of patches in another order.

    Both axes have the same frequencies, or (`interleaved`) those of a whole head by turns, rows first.
    """
    cells = all_cells(tuple(grids), merge) if cells is None else cells
    return PatchPositions(cells, _per_axis(head_dim, theta, interleaved, device))


def angles_of(places: PatchPositions) -> RotaryCosSin:
    cells = places.cells.to(places.per_axis.device)
    return RotaryCosSin(*cos_sin((cells[..., None] * places.per_axis).flatten(1), torch.float32))


@lru_cache(maxsize=8)
def _per_axis(head_dim: int, theta: float, interleaved: bool, device: torch.device) -> Tensor:
    """Of both axes [d / 4], or of each [2, d / 4]."""
    if interleaved:
        return frequencies(head_dim, theta, device).view(-1, 2).T.contiguous()
    return frequencies(head_dim // 2, theta, device)


def reorder(x: Tensor, order: Tensor, merge: int) -> Tensor:
    """Rows of patches [T, ...] with their tokens in another order; the patches of a token stay together."""
    return x.view(len(order), merge**2, *x.shape[1:]).index_select(0, order).flatten(0, 1)


def by_token(cells: Tensor, merge: int) -> Tensor:
    """[h, w, n] of a frame -> [h * w, n] in the order of `pixels.patchify`."""
    height, width, size = cells.shape
    blocks = cells.view(height // merge, merge, width // merge, merge, size)
    return blocks.transpose(1, 2).reshape(-1, size)


@lru_cache(maxsize=8)
def all_cells(grids: tuple[Grid, ...], merge: int) -> Tensor:
    """Row and column of each patch of packed pictures: int16 [patches, 2], on the host."""
    return torch.cat([_cells(grid, merge) for grid in grids])


@lru_cache(maxsize=64)  # pictures of one camera have one grid
def _cells(grid: Grid, merge: int) -> Tensor:
    """Row and column of each patch of a picture, in the order of `pixels.patchify`: int16 [patches, 2]."""
    rows, columns = torch.meshgrid(
        torch.arange(grid.h, dtype=torch.int16), torch.arange(grid.w, dtype=torch.int16), indexing="ij"
    )
    return by_token(torch.stack((rows, columns), dim=-1), merge).repeat(grid.t, 1)


def vision_config(config: ModelConfig) -> VisionConfig:
    if config.vision is None:
        raise ConfigError(f"config.json of a {config.model_type} model needs a vision_config")
    return config.vision


def rotary_dim(vision: VisionConfig) -> int:
    """Of a head that turns: pairs of values with a patch's row, and as many with its column."""
    dim = vision.hidden_size // vision.num_heads
    if dim % 4:
        raise ConfigError(
            f"config.json: vision_config has heads of {dim} values ({vision.hidden_size} in {vision.num_heads} heads), "
            "but heads that turn with rows and columns need a multiple of 4; check hidden_size and num_heads or "
            "num_attention_heads"
        )
    return dim
