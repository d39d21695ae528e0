"""The first Qwen and Qwen-VL: a tower for one square, a resampler with learned queries, Qwen's decoder."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import ModelConfig, TextConfig, VisionConfig
from saccade.errors import ConfigError
from saccade.models.families.llama import Text
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.decoder import Biases, Decoder, head_rule
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.layernorm import LayerNorm
from saccade.models.layers.linear import PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks
from saccade.models.vision.blocks import VisionBlock, vision_config
from saccade.models.vision.preprocess import PatchLayout
from saccade.models.vision.resampler import RESAMPLER_END_RULES, RESAMPLER_RULES, Resampler
from saccade.models.weights import Rule, under
from saccade.types.media import Grid

_EPS = 1e-6  # of all norms in the tower
_NUM_POSITIONS = 256  # learned position embeddings of patches for any size: 16 x 16


class Qwen(Text):
    def make_decoder(self, params: Parameters) -> Decoder:
        return _decoder(params, self.config)

    def rules(self) -> tuple[Rule, ...]:
        decoder = under(_DECODER_RULES, ("transformer.",), "decoder.")
        return (*decoder, *under([head_rule(self.config.text)], ("",), "decoder."))


class QwenVL(DecoderModel):
    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        config = parts.config
        params = parts.params
        vision = vision_config(config)
        visual = config.raw["vision_config"]
        width = visual.get("output_dim")
        hidden = config.text.hidden_size
        if width != hidden:
            raise ConfigError(f"visual: output_dim={width} is not the decoder's width {hidden}")
        self.layout = PatchLayout(vision.patch_size)
        self.tower = Tower(params.within("vision"), vision)
        self.resampler = GridResampler(
            params.within("resampler"), vision.hidden_size, width, visual["n_queries"]
        )
        self.decoder = _decoder(params.within("decoder"), config)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        features = yield from self.tower.encode(patches, grids, self.ops)
        return list(self.resampler(features, grids))

    def rules(self) -> tuple[Rule, ...]:
        return (
            *under(_DECODER_RULES, ("transformer.",), "decoder."),
            *under([head_rule(self.config.text)], ("",), "decoder."),
            *under(_TOWER_RULES, ("transformer.visual.",), "vision."),
            *under(RESAMPLER_RULES, ("transformer.visual.attn_pool.",), "resampler."),
            *under(RESAMPLER_END_RULES, ("transformer.visual.",), "resampler."),
        )


class Tower:
    """A tower without a class token and without a norm after the last layer."""

    def __init__(self, params: Parameters, vision: VisionConfig) -> None:
        hidden = vision.hidden_size
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, hidden)
        self.positions = params.new("positions", _NUM_POSITIONS, hidden)
        self.norm = LayerNorm(params.within("norm"), hidden, _EPS)
        self.blocks = [_block(block, vision) for block in params.each("blocks", vision.num_layers)]

    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: VisionOps) -> Generator[int, None, Tensor]:
        """Packed patches -> [patches, hidden]; yields after each layer."""
        run = ops.begin([grid.patches for grid in grids], None, patches.device)
        x = self.norm(self.patch(patches).add_(_interpolated_all(self.positions, grids)))
        del patches
        return (yield from run_blocks(run, self.blocks, x))


def _block(params: Parameters, vision: VisionConfig) -> VisionBlock:
    """Checkpoints store its qkv projection head by head: q, k and v of the first one, then of the second."""
    block = VisionBlock(params, vision, eps=_EPS, is_qkv_fused=True)
    qkv = params.within("qkv")
    for name, tensor in (("weight", block.qkv.weight), ("bias", block.qkv.bias)):
        assert tensor is not None
        by_kind = tensor.view(3, vision.num_heads, -1, *tensor.shape[1:])  # [3, heads, d, ...]
        qkv.add(name, by_kind.transpose(0, 1))
    return block


class GridResampler(Resampler):
    """Queries lie on a square grid of learned positions, which is interpolated to the patches of an image."""

    def __init__(self, params: Parameters, inputs: int, width: int, queries: int) -> None:
        super().__init__(params, inputs, width, queries)
        self.positions = params.new("positions", queries, width)

    def queries(self) -> Tensor:
        return super().queries() + self.positions

    def key_positions(self, grids: Sequence[Grid], like: Tensor) -> Tensor:
        return _interpolated_all(self.positions, grids)


def _interpolated_all(positions: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Embeddings on a square grid [positions, n] -> [patches, n] of all images, interpolated."""
    spread = {grid: _interpolated(positions, grid) for grid in set(grids)}
    return torch.cat([spread[grid] for grid in grids])


def _interpolated(positions: Tensor, grid: Grid) -> Tensor:
    side = math.isqrt(len(positions))
    if (grid.h, grid.w) == (side, side):
        return positions
    square = positions.float().T.reshape(1, -1, side, side)
    spread = F.interpolate(square, (grid.h, grid.w), mode="bicubic")[0]  # [n, h, w]
    return spread.flatten(1).T.to(positions.dtype)


def _decoder(params: Parameters, config: ModelConfig) -> Decoder:
    """q, k and v have biases and are one tensor in checkpoints; other biases depend on the config."""
    _check(config.text, config.raw)
    has_bias = not config.raw.get("no_bias", True)
    decoder = Decoder(params, config.text, Biases(qkv=True, out=has_bias, mlp=has_bias))
    for inner, layer in zip(params.each("layers", len(decoder.layers)), decoder.layers, strict=True):
        qkv = layer.attention.qkv
        for kind, tensor, scales in (("weight", qkv.weight, qkv.scales), ("bias", qkv.bias, None)):
            inner.add_whole(f"qkv.{kind}", tensor, [f"qkv.{part}.{kind}" for part in "qkv"], scales)
    return decoder


def _check(text: TextConfig, raw: Mapping[str, Any]) -> None:
    if raw.get("rotary_pct", 1.0) != 1.0:
        only = "all of a head is turned here (1.0)"
        raise ConfigError(f"rotary_pct={raw['rotary_pct']} is not supported; {only}")
    if text.num_heads * text.head_dim != text.hidden_size:
        heads = f"{text.num_heads} heads of kv_channels={text.head_dim}"
        raise ConfigError(f"{heads} do not add up to hidden_size={text.hidden_size}")


_DECODER_RULES = (
    Rule("wte.weight", "embed.weight"),
    Rule("h.{}.ln_1.weight", "layers.{}.attention_norm.weight"),
    Rule("h.{}.attn.c_attn.*", "layers.{}.qkv.*"),
    Rule("h.{}.attn.c_proj.*", "layers.{}.out.*"),
    Rule("h.{}.ln_2.weight", "layers.{}.mlp_norm.weight"),
    Rule("h.{}.mlp.w1.*", "layers.{}.gate_up.up.*"),
    Rule("h.{}.mlp.w2.*", "layers.{}.gate_up.gate.*"),
    Rule("h.{}.mlp.c_proj.*", "layers.{}.down.*"),
    Rule("h.{}.attn.masked_bias", None),
    Rule("h.{}.attn.rotary_emb.inv_freq", None),
    Rule("rotary_emb.inv_freq", None),
    Rule("ln_f.weight", "norm.weight"),
)
_TOWER_RULES = (
    Rule("conv1.weight", "patch.weight"),
    Rule("positional_embedding", "positions"),
    Rule("ln_pre.*", "norm.*"),
    *under(
        (
            Rule("ln_1.*", "attention_norm.*"),
            Rule("attn.in_proj.*", "qkv.*"),
            Rule("attn.out_proj.*", "out.*"),
            Rule("ln_2.*", "mlp_norm.*"),
            Rule("mlp.c_fc.*", "up.*"),
            Rule("mlp.c_proj.*", "down.*"),
        ),
        ("transformer.resblocks.{}.",),
        "blocks.{}.",
    ),
)
