"""The vision tower of Llama 3.2 Vision: a local stack over all tiles of an image, then a gated global stack.

An image occupies all tile slots, and each tile is padded to a multiple of eight rows. As the model was
trained, rows of the image attend to every row, including padding and empty tiles; those attend to the image
alone. So the image's own rows come first:

    own rows     tile 0: class token, patches | tile 1: ...
    other rows   padding of tile 0 | padding of tile 1 | empty tile 2 with its padding | empty tile 3 ...
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError
from saccade.models.layers.activation import activation
from saccade.models.layers.layernorm import LayerNorm
from saccade.models.layers.linear import Linear, PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule, under
from saccade.types.media import Grid

_EPS = 1e-5  # of the norms around the stacks; not in the config
_MULTIPLE = 8  # of a tile's rows
_DEFAULT_FEATURES = (3, 7, 15, 23, 30)


class TileTower:
    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> None:
        hidden = vision.hidden_size
        eps = raw.get("norm_eps", 1e-5)
        self.side = _image_size(vision) // vision.patch_size
        self.rows = self.side**2 + 1  # of a tile: a class token and the patches
        self.padded = -(-self.rows // _MULTIPLE) * _MULTIPLE
        self.max_tiles = raw.get("max_num_tiles", 4)
        self.features = _features(raw)
        self.width = hidden * (1 + len(self.features))
        sides = range(1, self.max_tiles + 1)
        # (rows, columns) of tiles, in the order of aspect ratio ids.
        self.arrangements = [(h, w) for h in sides for w in sides if h * w <= self.max_tiles]
        kinds = len(self.arrangements) + 1  # 0 means no image, which is not used here
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, hidden)
        self.first = params.new("class_token", hidden)
        self.positions = params.new("positions", self.rows, hidden)
        self.tile_positions = params.new("tile_positions.weight", kinds, self.max_tiles * self.rows * hidden)
        self.position_gate = params.new("position_gate", 1)
        self.before = TileEmbedding(params.within("before"), kinds, self.max_tiles, hidden)
        self.after = TileEmbedding(params.within("after"), kinds, self.max_tiles, hidden)
        self.norm_before = LayerNorm(params.within("norm_before"), hidden, _EPS)
        self.norm_after = LayerNorm(params.within("norm_after"), hidden, _EPS)
        num_global = raw.get("num_global_layers", 8)
        blocks = params.each("blocks", vision.num_layers - num_global)
        self.blocks = [TileBlock(block, vision, eps, False) for block in blocks]
        global_blocks = params.each("global_blocks", num_global)
        self.global_blocks = [TileBlock(block, vision, eps, True) for block in global_blocks]

    def encode(self, patches: Tensor, grid: Grid) -> Generator[int, None, Tensor]:
        """Patches of one image, row by row over its canvas -> [own rows, width]; yields after each layer."""
        rows = grid.h // self.side
        columns = grid.w // self.side
        kind = self.arrangements.index((rows, columns)) + 1
        image_rows = rows * columns * self.rows
        x = self._embed(patches, rows, columns, kind)
        del patches
        outputs = []
        for index, block in enumerate(self.blocks):
            x = block(x, image_rows)
            if index in self.features:
                outputs.append(x[:image_rows].clone())
            yield 1
        x = self.norm_after(x) + self._sort(self.after(kind).expand(-1, self.padded, -1), rows * columns)
        for block in self.global_blocks:
            x = block(x, image_rows)
            yield 1
        features = torch.stack(outputs, dim=-1).flatten(1)  # channel by channel
        return torch.cat((x[:image_rows], features), dim=1)

    def _embed(self, patches: Tensor, rows: int, columns: int, kind: int) -> Tensor:
        """[tile slots * padded rows, hidden], the image's own rows first."""
        hidden = len(self.first)
        tiles = rows * columns
        canvas = self.patch(patches).view(rows, self.side, columns, self.side, hidden)
        x = canvas.new_zeros(self.max_tiles, self.rows, hidden)  # empty tiles have zero embeddings
        x[:tiles, 1:] = canvas.transpose(1, 2).reshape(tiles, -1, hidden)
        x[:, 1:] += self.before(kind)
        x[:, 0] = self.first
        gate = self.position_gate.tanh()
        x += (1 - gate) * self.positions + gate * self.tile_positions[kind].view(x.shape)
        return self._sort(F.pad(self.norm_before(x), (0, 0, 0, self.padded - self.rows)), tiles)

    def _sort(self, x: Tensor, tiles: int) -> Tensor:
        """[tile slots, padded rows, hidden] -> [all rows, hidden], own rows first."""
        image_rows = x[:tiles, : self.rows]
        padding = x[:tiles, self.rows :]
        return torch.cat([part.flatten(0, 1) for part in (image_rows, padding, x[tiles:])])

    def rules(self) -> tuple[Rule, ...]:
        return (
            *under(_BLOCK_RULES, ("transformer.layers.{}.",), "blocks.{}."),
            *under((*_BLOCK_RULES, *_GATE_RULES), ("global_transformer.layers.{}.",), "global_blocks.{}."),
            *_TOWER_RULES,
        )


class TileEmbedding:
    """A gated vector per tile slot and arrangement."""

    def __init__(self, params: Parameters, kinds: int, max_tiles: int, hidden: int) -> None:
        self.table = params.new("weight", kinds, max_tiles * hidden)
        self.gate = params.new("gate", 1)
        self.shape = (max_tiles, 1, hidden)

    def __call__(self, kind: int) -> Tensor:  # [tile slots, 1, hidden]
        return self.table[kind].view(self.shape) * self.gate.tanh()


class TileBlock:
    """Attention over all tiles of an image, then an MLP; in the global stack both are gated."""

    def __init__(self, params: Parameters, vision: VisionConfig, eps: float, is_gated: bool) -> None:
        hidden = vision.hidden_size
        wide = vision.intermediate_size
        self.heads = vision.num_heads
        self.attention_norm = LayerNorm(params.within("attention_norm"), hidden, eps)
        self.qkv = Linear(params.within("qkv"), hidden, {"q": hidden, "k": hidden, "v": hidden})
        self.out = Linear(params.within("out"), hidden, hidden)
        self.mlp_norm = LayerNorm(params.within("mlp_norm"), hidden, eps)
        self.up = Linear(params.within("up"), hidden, wide, bias=True)
        self.act = activation(vision.hidden_act)
        self.down = Linear(params.within("down"), wide, hidden, bias=True)
        self.gates: Gates | None = None
        if is_gated:
            self.gates = Gates(params.new("attention_gate", 1), params.new("mlp_gate", 1))

    def __call__(self, x: Tensor, image_rows: int) -> Tensor:
        mixed = self.attend(self.attention_norm(x), image_rows)
        if self.gates is not None:
            mixed.mul_(self.gates.attention.tanh())
        x = x + mixed
        out = self.down(self.act(self.up(self.mlp_norm(x))))
        if self.gates is not None:
            out.mul_(self.gates.mlp.tanh())
        return x.add_(out)

    def attend(self, x: Tensor, image_rows: int) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)  # [heads, T, d] each
        image = F.scaled_dot_product_attention(q[None, :, :image_rows], k[None], v[None])
        padding = F.scaled_dot_product_attention(
            q[None, :, image_rows:], k[None, :, :image_rows], v[None, :, :image_rows]
        )
        return self.out(torch.cat((image, padding), dim=2)[0].transpose(0, 1).flatten(1))


class Gates(NamedTuple):
    attention: Tensor  # [1]
    mlp: Tensor


def _image_size(vision: VisionConfig) -> int:
    if not isinstance(vision.image_size, int) or vision.image_size % vision.patch_size:
        raise ConfigError(
            f"vision_config: image_size {vision.image_size} must be the side of a tile, a multiple of the "
            f"patch size {vision.patch_size}"
        )
    return vision.image_size


def _features(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose output the projector gets beside the last one's, ascending."""
    layers = setting(raw, "intermediate_layers_indices", _DEFAULT_FEATURES)
    if not are_rising(layers, raw["num_hidden_layers"]):
        limit = f"{raw['num_hidden_layers']} layers"
        raise ConfigError(f"intermediate_layers_indices {list(layers)} must rise and lie within {limit}")
    return tuple(layers)


def are_rising(layers: Sequence[int], count: int) -> bool:
    """Whether these are some of so many layers, in order."""
    return bool(layers) and sorted(set(layers) & set(range(count))) == list(layers)


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
