"""The tower of Llama 3.2 Vision: tiles of one picture that see each other, then a second stack with gates.

A picture takes all tile slots, whether it fills them or not, and each tile is padded to a multiple of eight rows. Who
sees whom is as the model was trained: rows of the picture see every row, padding and empty tiles included; those see
the picture alone. So the rows of the picture are kept in front:

    own rows     tile 0: class token, patches | tile 1: ...
    other rows   padding of tile 0 | padding of tile 1 | empty tile 2 with its padding | empty tile 3 ...
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.errors import ConfigError
from saccade.models.layers.basic import LayerNorm, Linear, PatchLinear, activation
from saccade.models.parameters import Parameters
from saccade.models.weights import Rule, under
from saccade.types import Grid

_EPS = 1e-5  # of the norms around the stacks; no config names it
_MULTIPLE = 8  # rows of a tile are padded to
_DEFAULT_FEATURES = (3, 7, 15, 23, 30)


class TileTower:
    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> None:
        hidden, eps = vision.hidden_size, raw.get("norm_eps", 1e-5)
        self.side = _image_size(vision) // vision.patch_size
        self.rows = self.side**2 + 1  # of a tile: a class token and the patches
        self.padded = -(-self.rows // _MULTIPLE) * _MULTIPLE
        self.max_tiles = raw.get("max_num_tiles", 4)
        self.features = _features(raw)
        self.width = hidden * (1 + len(self.features))
        self.arrangements = _arrangements(self.max_tiles)
        kinds = len(self.arrangements) + 1  # number 0 means no picture, and is not used here
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, hidden)
        self.first = params.new("class_token", hidden)
        self.positions = params.new("positions", self.rows, hidden)
        self.tile_positions = params.new("tile_positions.weight", kinds, self.max_tiles * self.rows * hidden)
        self.position_gate = params.new("position_gate", 1)
        self.before, self.after = (TileEmbedding(params.within(n), kinds, self.max_tiles, hidden) for n in _AROUND)
        self.norm_before, self.norm_after = (LayerNorm(params.within(f"norm_{n}"), hidden, _EPS) for n in _AROUND)
        num_global = raw.get("num_global_layers", 8)
        local, wide = params.within("blocks"), params.within("global_blocks")
        self.blocks = [TileBlock(local.within(i), vision, eps, False) for i in range(vision.num_layers - num_global)]
        self.global_blocks = [TileBlock(wide.within(i), vision, eps, True) for i in range(num_global)]

    def encode(self, patches: Tensor, grid: Grid) -> Generator[int, None, Tensor]:
        """Patches of one picture, row by row over its canvas -> [its own rows, width]; pauses after each layer."""
        rows, columns = grid.h // self.side, grid.w // self.side
        kind, own = self.arrangements.index((rows, columns)) + 1, rows * columns * self.rows
        x = self._embed(patches, rows, columns, kind)
        del patches
        kept = []
        for index, block in enumerate(self.blocks):
            x = block(x, own)
            if index in self.features:
                kept.append(x[:own].clone())
            yield 1
        x = self.norm_after(x) + self._sort(self.after(kind).expand(-1, self.padded, -1), rows * columns)
        for block in self.global_blocks:
            x = block(x, own)
            yield 1
        deep = torch.stack(kept, dim=-1).flatten(1)  # the features of one channel lie side by side
        return torch.cat((x[:own], deep), dim=1)

    def _embed(self, patches: Tensor, rows: int, columns: int, kind: int) -> Tensor:
        """[tile slots * padded rows, hidden], the picture's own rows in front."""
        hidden, tiles = len(self.first), rows * columns
        canvas = self.patch(patches).view(rows, self.side, columns, self.side, hidden)
        x = canvas.new_zeros(self.max_tiles, self.rows, hidden)  # pixels of empty tiles are zero, and so are products
        x[:tiles, 1:] = canvas.transpose(1, 2).reshape(tiles, -1, hidden)
        x[:, 1:] += self.before(kind)
        x[:, 0] = self.first
        gate = self.position_gate.tanh()
        x += (1 - gate) * self.positions + gate * self.tile_positions[kind].view(x.shape)
        return self._sort(F.pad(self.norm_before(x), (0, 0, 0, self.padded - self.rows)), tiles)

    def _sort(self, x: Tensor, tiles: int) -> Tensor:
        """[tile slots, padded rows, hidden] -> [all of them, hidden], own rows first."""
        own, padding = x[:tiles, : self.rows], x[:tiles, self.rows :]
        return torch.cat([part.flatten(0, 1) for part in (own, padding, x[tiles:])])

    def rules(self) -> tuple[Rule, ...]:
        return (
            *under(_BLOCK_RULES, ("transformer.layers.{}.",), "blocks.{}."),
            *under((*_BLOCK_RULES, *_GATE_RULES), ("global_transformer.layers.{}.",), "global_blocks.{}."),
            *_TOWER_RULES,
        )


class TileEmbedding:
    """A vector per tile slot and arrangement, behind a gate."""

    def __init__(self, params: Parameters, kinds: int, max_tiles: int, hidden: int) -> None:
        self.table = params.new("weight", kinds, max_tiles * hidden)
        self.gate = params.new("gate", 1)
        self.shape = (max_tiles, 1, hidden)

    def __call__(self, kind: int) -> Tensor:  # [tile slots, 1, hidden]
        return self.table[kind].view(self.shape) * self.gate.tanh()


class TileBlock:
    """Attention over the tiles of a picture, then an MLP; what each adds may pass a gate."""

    def __init__(self, params: Parameters, vision: VisionConfig, eps: float, is_gated: bool) -> None:
        hidden, wide = vision.hidden_size, vision.intermediate_size
        self.heads = vision.num_heads
        self.attention_norm = LayerNorm(params.within("attention_norm"), hidden, eps)
        self.qkv = Linear(params.within("qkv"), hidden, {"q": hidden, "k": hidden, "v": hidden})
        self.out = Linear(params.within("out"), hidden, hidden)
        self.mlp_norm = LayerNorm(params.within("mlp_norm"), hidden, eps)
        self.up = Linear(params.within("up"), hidden, wide, bias=True)
        self.act = activation(vision.hidden_act)
        self.down = Linear(params.within("down"), wide, hidden, bias=True)
        self.gates = Gates(params.new("attention_gate", 1), params.new("mlp_gate", 1)) if is_gated else None

    def __call__(self, x: Tensor, own: int) -> Tensor:
        mixed = self.attend(self.attention_norm(x), own)
        x = x + (mixed if self.gates is None else mixed.mul_(self.gates.attention.tanh()))
        made = self.down(self.act(self.up(self.mlp_norm(x))))
        return x.add_(made if self.gates is None else made.mul_(self.gates.mlp.tanh()))

    def attend(self, x: Tensor, own: int) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)  # [heads, T, d] each
        image = F.scaled_dot_product_attention(q[None, :, :own], k[None], v[None])
        others = F.scaled_dot_product_attention(q[None, :, own:], k[None, :, :own], v[None, :, :own])
        return self.out(torch.cat((image, others), dim=2)[0].transpose(0, 1).flatten(1))


class Gates(NamedTuple):
    attention: Tensor  # [1]
    mlp: Tensor


def _arrangements(max_tiles: int) -> list[tuple[int, int]]:
    """Rows and columns of tiles, in the order of the tables."""
    sides = range(1, max_tiles + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]


def _image_size(vision: VisionConfig) -> int:
    if not isinstance(vision.image_size, int) or vision.image_size % vision.patch_size:
        raise ConfigError(
            f"vision_config: image_size {vision.image_size} must be the side of a tile, a multiple of the patch size "
            f"{vision.patch_size}"
        )
    return vision.image_size


def _features(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose output the projector gets beside the last one's. Rising, so that they can be kept as they come."""
    given = raw.get("intermediate_layers_indices") or _DEFAULT_FEATURES
    if sorted(set(given)) != list(given) or not 0 <= given[0] <= given[-1] < raw["num_hidden_layers"]:
        raise ConfigError(
            f"intermediate_layers_indices {list(given)} must rise and lie within {raw['num_hidden_layers']} layers"
        )
    return tuple(given)


_AROUND = ("before", "after")
_TOWER_RULES = (
    Rule("patch_embedding.weight", "patch.weight"),
    Rule("class_embedding", "class_token"),
    Rule("gated_positional_embedding.embedding", "positions"),
    Rule("gated_positional_embedding.gate", "position_gate"),
    Rule("gated_positional_embedding.tile_embedding.weight", "tile_positions.weight"),
    Rule("pre_tile_positional_embedding.embedding.weight", "before.weight"),
    Rule("pre_tile_positional_embedding.gate", "before.gate"),
    Rule("post_tile_positional_embedding.embedding.weight", "after.weight"),
    Rule("post_tile_positional_embedding.gate", "after.gate"),
    Rule("layernorm_pre.*", "norm_before.*"),
    Rule("layernorm_post.*", "norm_after.*"),
)
_BLOCK_RULES = (
    Rule("input_layernorm.*", "attention_norm.*"),
    Rule("self_attn.q_proj.*", "qkv.q.*"),
    Rule("self_attn.k_proj.*", "qkv.k.*"),
    Rule("self_attn.v_proj.*", "qkv.v.*"),
    Rule("self_attn.o_proj.*", "out.*"),
    Rule("post_attention_layernorm.*", "mlp_norm.*"),
    Rule("mlp.fc1.*", "up.*"),
    Rule("mlp.fc2.*", "down.*"),
)
_GATE_RULES = (Rule("gate_attn", "attention_gate"), Rule("gate_ffn", "mlp_gate"))
