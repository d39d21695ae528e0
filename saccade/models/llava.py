"""LLaVA 1.5: a CLIP tower for square pictures of one size, a two-layer projector, a Llama-like decoder."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.config import ConfigError, ModelConfig, TextConfig, VisionConfig
from saccade.models.decoder import Biases, Decoder, decoder_rules, head_rule
from saccade.models.interface import Attention, Encoding
from saccade.models.layers import LayerNorm, Linear, Parameters, PatchLinear, activation
from saccade.models.pixels import PatchLayout, Picture, centre_crop, pixel_policy
from saccade.models.vision import VisionBlock, vision_config
from saccade.models.vision_ops import VisionOps
from saccade.models.weights import Rule, under
from saccade.types import Geometry, Grid, Size


class Llava:
    def __init__(
        self, config: ModelConfig, params: Parameters, image_processor: Mapping[str, Any], ops: VisionOps
    ) -> None:
        raw, vision = config.raw, vision_config(config)
        self.config = config
        self.params = params
        self.ops = ops
        self.pixels = pixel_policy(image_processor)
        self.square = Size(_image_size(vision), _image_size(vision))
        self.layout = PatchLayout(vision.patch_size)
        self.tower = ClipTower(params.within("vision"), vision, raw)
        self.projector = Projector(params.within("projector"), self.tower.width, config.text.hidden_size, raw)
        self.decoder = Decoder(params.within("decoder"), config.text, _biases(config.text, raw))

    def prepare(self, image: Picture, geometry: Geometry) -> Tensor:
        small = self.ops.resize(image, geometry.resized, self.pixels.resample)
        square = centre_crop(small, self.square).to(self.params.device)
        return self.ops.cut(square, geometry.grid, self.layout, self.pixels, self.params.dtype)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        features = yield from self.tower.encode(patches, len(grids), self.ops)
        return list(self.projector(features))

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.decoder.embed(token_ids)

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return self.decoder.forward(embeds, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    def rules(self) -> tuple[Rule, ...]:
        text = self.config.text
        levels = ("model.vision_tower.", "vision_tower.")
        towers = (*levels, *(f"{level}vision_model." for level in levels))
        return (
            *under(decoder_rules(text), ("model.language_model.", "language_model.model."), "decoder."),
            *under([head_rule(text)], ("", "language_model."), "decoder."),
            *under(self.tower.rules(), towers, "vision."),
            *under(_PROJECTOR_RULES, ("model.multi_modal_projector.", "multi_modal_projector."), "projector."),
        )


class ClipTower:
    """CLIP up to the last layer whose output is used; the layers behind it are neither loaded nor run."""

    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> None:
        self.features = _feature_layers(raw, vision.num_layers)
        self.keeps_class = _keeps_class(raw)
        self.num_layers = vision.num_layers
        self.width = vision.hidden_size * len(self.features)
        eps = raw["vision_config"].get("layer_norm_eps", 1e-5)
        num_patches = (_image_size(vision) // vision.patch_size) ** 2
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, vision.hidden_size)
        self.first = params.new("class_token", vision.hidden_size)
        self.positions = params.new("positions.weight", num_patches + 1, vision.hidden_size)
        self.norm = LayerNorm(params.within("norm"), vision.hidden_size, eps)
        blocks = params.within("blocks")
        self.blocks = [
            VisionBlock(blocks.within(i), vision, eps=eps, is_qkv_fused=False) for i in range(max(self.features))
        ]

    def encode(self, patches: Tensor, pictures: int, ops: VisionOps) -> Generator[None, None, Tensor]:
        """Patches of equal pictures -> features [pictures, slots, width]; pauses after each layer."""
        run = ops.begin([len(self.positions)] * pictures, None, patches.device)
        x = self._embed(patches, pictures)
        del patches
        kept = {0: x.clone()} if 0 in self.features else {}
        for i, block in enumerate(self.blocks, start=1):
            x = run(block, x)
            if i in self.features:
                kept[i] = x if i == len(self.blocks) else x.clone()  # the next block may overwrite it
            yield
        features = torch.cat([kept[i] for i in self.features], dim=-1).view(pictures, -1, self.width)
        return features if self.keeps_class else features[:, 1:]

    def _embed(self, patches: Tensor, pictures: int) -> Tensor:
        """[pictures * (1 + patches), hidden]: a class token, then the patches of each picture."""
        cut = self.patch(patches).view(pictures, -1, len(self.first))  # [pictures, patches, hidden]
        first = self.first.expand(pictures, 1, -1)
        return self.norm(torch.cat((first, cut), dim=1).add_(self.positions)).flatten(0, 1)

    def rules(self) -> tuple[Rule, ...]:
        unused = (f"encoder.layers.{i}." for i in range(len(self.blocks), self.num_layers))
        ignored = [Rule(level + rule.source, None) for level in unused for rule in _BLOCK_RULES]
        used = under(_BLOCK_RULES, ("encoder.layers.{}.",), "blocks.{}.")
        return (*ignored, *used, *_CLIP_RULES)


class Projector:
    """From the tower's width to the decoder's."""

    def __init__(self, params: Parameters, inputs: int, outputs: int, raw: Mapping[str, Any]) -> None:
        bias = raw.get("multimodal_projector_bias", True)
        self.up = Linear(params.within("up"), inputs, outputs, bias=bias)
        self.act = activation(raw.get("projector_hidden_act", "gelu"))
        self.down = Linear(params.within("down"), outputs, outputs, bias=bias)

    def __call__(self, features: Tensor) -> Tensor:
        return self.down(self.act(self.up(features)))


# --- what config.json says ----------------------------------------------------------------------------------------


def _feature_layers(raw: Mapping[str, Any], num_layers: int) -> list[int]:
    """Which hidden states the projector gets, counted from the embeddings (0) to the last layer's output."""
    given = raw.get("vision_feature_layer", -2)
    layers = given if isinstance(given, list) else [given]
    resolved = [i if i >= 0 else num_layers + 1 + i for i in layers]
    if not resolved or not all(0 <= i <= num_layers for i in resolved):
        raise ConfigError(f"vision_feature_layer {given} must lie within the {num_layers} layers of the vision tower")
    return resolved


def _keeps_class(raw: Mapping[str, Any]) -> bool:
    strategy = raw.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ConfigError(f"vision_feature_select_strategy must be default or full, not {strategy!r}")
    return bool(strategy == "full")


def _image_size(vision: VisionConfig) -> int:
    if vision.image_size is None:
        raise ConfigError("config.json: vision_config has no image_size, which a CLIP tower needs")
    return vision.image_size


def _biases(text: TextConfig, raw: Mapping[str, Any]) -> Biases:
    given = raw.get("text_config") or {}
    if text.model_type == "qwen2":
        return Biases(qkv=True)
    if text.model_type == "llama":
        attention = given.get("attention_bias", False)
        return Biases(qkv=attention, out=attention, mlp=given.get("mlp_bias", False))
    raise ConfigError(f"a llava model with a {text.model_type!r} decoder is not supported; known are llama and qwen2")


# --- the weight map -----------------------------------------------------------------------------------------------

_CLIP_RULES = (
    Rule("embeddings.class_embedding", "class_token"),
    Rule("embeddings.patch_embedding.weight", "patch.weight"),
    Rule("embeddings.position_embedding.weight", "positions.weight"),
    Rule("embeddings.position_ids", None),
    Rule("pre_layrnorm.*", "norm.*"),  # the misspelling is CLIP's own
    Rule("post_layernorm.*", None),  # of the class token alone, which is not used
)
_BLOCK_RULES = (
    Rule("layer_norm1.*", "attention_norm.*"),
    Rule("self_attn.q_proj.*", "qkv.q.*"),
    Rule("self_attn.k_proj.*", "qkv.k.*"),
    Rule("self_attn.v_proj.*", "qkv.v.*"),
    Rule("self_attn.out_proj.*", "out.*"),
    Rule("layer_norm2.*", "mlp_norm.*"),
    Rule("mlp.fc1.*", "up.*"),
    Rule("mlp.fc2.*", "down.*"),
)
_PROJECTOR_RULES = (Rule("linear_1.*", "up.*"), Rule("linear_2.*", "down.*"))
