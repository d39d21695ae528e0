"""Transformer blocks of vision towers, over the packed patches of several images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.checkpoint.config import ModelConfig, VisionConfig
from saccade.errors import ConfigError
from saccade.models.layers.activation import activation, gated_activation
from saccade.models.layers.layernorm import LayerNorm, RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.rotary_embedding import cos_sin, frequencies, rotate
from saccade.models.layers.torch_attention import packed_attention
from saccade.models.state_dict import Parameters
from saccade.types.media import Grid


class RotaryCosSin(NamedTuple):
    """RoPE of packed patches."""

    cos: Tensor  # float32 [T, d]
    sin: Tensor


@dataclass(eq=False)
class PatchPositions:
    """Positions and RoPE frequencies of packed patches."""

    cells: Tensor  # int16 [T, 2]: row and column of each, on the CPU; the same tensor for the same grids
    per_axis: Tensor  # float32, on the device: frequencies of both axes [d / 4], or of each [2, d / 4]
    rotary: Tensor | None = None  # cos and sin as `cuda.vision` computed them, reused by the next pass

    def are(self, other: PatchPositions | None) -> bool:
        """Whether the positions are known to be equal; may miss some that are."""
        return other is not None and self.cells is other.cells and self.per_axis is other.per_axis


_ALIGNED = 8  # two-byte values in a 16-byte load: rows of fast GEMMs are a multiple of it

Norm = LayerNorm | RMSNorm


class VisionBlock:
    """A pre-norm block: attention inside each image, then an MLP."""

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
        hidden = vision.hidden_size
        wide = vision.intermediate_size
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
        # Contiguous heads speed up attention by more than the copy costs; RoPE makes the copy anyway.
        if angles is None:
            q, k, v = qkv.contiguous()
        else:
            q, k = rotate(qkv[:2].float(), angles.cos, angles.sin).to(x.dtype)  # in float32, as in training
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
    """2-D RoPE: half of each head rotates by the row, half by the column. `cells`: another order of patches.

    Both axes have the same frequencies, or (`interleaved`) alternate ones of a whole head, rows first.
    """
    cells = all_cells(tuple(grids), merge) if cells is None else cells
    return PatchPositions(cells, _per_axis(head_dim, theta, interleaved, device))


def angles_of(positions: PatchPositions) -> RotaryCosSin:
    cells = positions.cells.to(positions.per_axis.device)
    return RotaryCosSin(*cos_sin((cells[..., None] * positions.per_axis).flatten(1), torch.float32))


@lru_cache(maxsize=8)
def _per_axis(head_dim: int, theta: float, interleaved: bool, device: torch.device) -> Tensor:
    """Frequencies of both axes [d / 4], or of each [2, d / 4]."""
    if interleaved:
        return frequencies(head_dim, theta, device).view(-1, 2).T.contiguous()
    return frequencies(head_dim // 2, theta, device)


def reorder(x: Tensor, order: Tensor, merge: int) -> Tensor:
    """Patches [T, ...] with their tokens in another order; the patches of a token stay together."""
    return x.view(len(order), merge**2, *x.shape[1:]).index_select(0, order).flatten(0, 1)


def by_token(cells: Tensor, merge: int) -> Tensor:
    """[h, w, n] of a frame -> [h * w, n] in the order of `preprocess.patchify`."""
    height, width, size = cells.shape
    blocks = cells.view(height // merge, merge, width // merge, merge, size)
    return blocks.transpose(1, 2).reshape(-1, size)


@lru_cache(maxsize=8)
def all_cells(grids: tuple[Grid, ...], merge: int) -> Tensor:
    """Row and column of each patch of packed images: int16 [patches, 2], on the CPU."""
    return torch.cat([_cells(grid, merge) for grid in grids])


@lru_cache(maxsize=64)  # images of one camera share a grid
def _cells(grid: Grid, merge: int) -> Tensor:
    """Row and column of each patch of an image, in the order of `preprocess.patchify`: int16 [patches, 2]."""
    sides = (torch.arange(side, dtype=torch.int16) for side in (grid.h, grid.w))
    cells = torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1)
    return by_token(cells, merge).repeat(grid.t, 1)


def vision_config(config: ModelConfig) -> VisionConfig:
    if config.vision is None:
        raise ConfigError(f"config.json of a {config.model_type} model needs a vision_config")
    return config.vision


def rotary_dim(vision: VisionConfig) -> int:
    """The head size, which 2-D RoPE divides into pairs for rows and as many for columns."""
    dim = vision.hidden_size // vision.num_heads
    if dim % 4:
        raise ConfigError(
            f"config.json: vision_config has heads of {dim} values ({vision.hidden_size} in "
            f"{vision.num_heads} heads), but heads that turn with rows and columns need a multiple of 4; "
            "check hidden_size and num_heads or num_attention_heads"
        )
    return dim
