"""CLIP and SigLIP: vision towers for square images of one size with learned positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.errors import ConfigError
from saccade.models.layers.layernorm import LayerNorm
from saccade.models.layers.linear import PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks_keeping
from saccade.models.vision.blocks import VisionBlock
from saccade.models.weights import Rule, under


class SquareTower(ABC):
    """Runs up to the last layer whose output is used; later layers are not loaded."""

    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any], eps: float) -> None:
        self.features = feature_layers(raw, vision.num_layers)
        self.side = image_size(vision) // vision.patch_size  # patches along each side
        self.num_layers = vision.num_layers
        self.width = vision.hidden_size * len(self.features)
        blocks = params.each("blocks", max(self.features))
        self.blocks = [VisionBlock(block, vision, eps=eps, is_qkv_fused=False) for block in blocks]

    @property
    def length(self) -> int:
        """Rows of one square inside the tower."""
        return self.side**2

    @abstractmethod
    def embed(self, patches: Tensor, squares: int) -> Tensor:
        """[squares * patches, patch_dim] -> [squares * length, hidden]"""

    def select(self, features: Tensor) -> Tensor:
        """[squares, length, width] -> the features for the projector."""
        return features

    def encode(self, patches: Tensor, squares: int, ops: VisionOps) -> Generator[int, None, Tensor]:
        """Patches of so many squares -> features [squares, slots, width]; yields after each layer."""
        run = ops.begin([self.length] * squares, None, patches.device)
        x = self.embed(patches, squares)
        del patches
        outputs = yield from run_blocks_keeping(run, self.blocks, x, self.features)
        features = torch.cat(outputs, dim=-1).view(squares, -1, self.width)
        return self.select(features)

    def rules(self) -> tuple[Rule, ...]:
        unused = (f"encoder.layers.{i}." for i in range(len(self.blocks), self.num_layers))
        ignored = [Rule(level + rule.source, None) for level in unused for rule in BLOCK_RULES]
        return (*ignored, *under(BLOCK_RULES, ("encoder.layers.{}.",), "blocks.{}."))


class ClipTower(SquareTower):
    """A tower with a class token before the patches and a norm before the first layer."""

    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> None:
        eps = raw["vision_config"].get("layer_norm_eps", 1e-5)
        super().__init__(params, vision, raw, eps)
        self.keeps_class = not drops_first(raw)
        self.patch = PatchLinear(params.within("patch"), _kernel(vision), vision.hidden_size)
        self.first = params.new("class_token", vision.hidden_size)
        self.positions = params.new("positions.weight", self.length, vision.hidden_size)
        self.norm = LayerNorm(params.within("norm"), vision.hidden_size, eps)

    @property
    def length(self) -> int:
        return self.side**2 + 1

    def embed(self, patches: Tensor, squares: int) -> Tensor:
        cut = self.patch(patches).view(squares, -1, len(self.first))  # [squares, patches, hidden]
        first = self.first.expand(squares, 1, -1)
        return self.norm(torch.cat((first, cut), dim=1).add_(self.positions)).flatten(0, 1)

    def select(self, features: Tensor) -> Tensor:
        return features if self.keeps_class else features[:, 1:]

    def rules(self) -> tuple[Rule, ...]:
        return (*super().rules(), *_CLIP_RULES)


class SiglipTower(SquareTower):
    """A tower without a class token. Features are taken before the last norm and the pooling head."""

    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> None:
        super().__init__(params, vision, raw, raw["vision_config"].get("layer_norm_eps", 1e-6))
        if drops_first(raw):
            raise no_class_token("SigLIP")
        self.patch = PatchLinear(params.within("patch"), _kernel(vision), vision.hidden_size)
        self.bias = params.new("patch.bias", vision.hidden_size)
        self.positions = params.new("positions.weight", self.length, vision.hidden_size)

    def embed(self, patches: Tensor, squares: int) -> Tensor:
        cut = self.patch(patches).view(squares, self.length, -1)
        return cut.add_(self.positions + self.bias).flatten(0, 1)

    def rules(self) -> tuple[Rule, ...]:
        return (*super().rules(), *_SIGLIP_RULES)


def square_tower(params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> SquareTower:
    """The tower that vision_config names, by default CLIP's."""
    kind = raw["vision_config"].get("model_type", "clip_vision_model")
    if kind not in _TOWERS:
        names = ", ".join(_TOWERS)
        raise ConfigError(f"a tower of model_type {kind!r} is not supported here; known are {names}")
    return _TOWERS[kind](params, vision, raw)


_TOWERS: Mapping[str, type[ClipTower | SiglipTower]] = {
    "clip_vision_model": ClipTower,
    "siglip_vision_model": SiglipTower,
}


def feature_layers(raw: Mapping[str, Any], num_layers: int) -> list[int]:
    """Indices of the hidden states for the projector, from the embeddings (0) to the last layer's output."""
    setting = raw.get("vision_feature_layer", -2)
    layers = setting if isinstance(setting, list) else [setting]
    resolved = [i if i >= 0 else num_layers + 1 + i for i in layers]
    if not resolved or min(resolved) < 0 or max(resolved) > num_layers:
        tower = f"the {num_layers} layers of the vision tower"
        raise ConfigError(f"vision_feature_layer {setting} must lie within {tower}")
    return resolved


def drops_first(raw: Mapping[str, Any]) -> bool:
    strategy = raw.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ConfigError(f"vision_feature_select_strategy must be default or full, not {strategy!r}")
    return bool(strategy == "default")


def no_class_token(tower: str) -> ConfigError:
    what = "vision_feature_select_strategy is default, which drops a class token"
    return ConfigError(f"{what}, but a {tower} tower has none; set it to full")


def image_size(vision: VisionConfig) -> int:
    if vision.image_size is None:
        raise ConfigError("config.json: vision_config has no image_size, which this tower needs")
    return vision.image_size


def _kernel(vision: VisionConfig) -> tuple[int, ...]:
    return vision.in_channels, vision.patch_size, vision.patch_size


_CLIP_RULES = (
    Rule("embeddings.class_embedding", "class_token"),
    Rule("embeddings.patch_embedding.weight", "patch.weight"),
    Rule("embeddings.position_embedding.weight", "positions.weight"),
    Rule("embeddings.position_ids", None),
    Rule("pre_layrnorm.*", "norm.*"),  # CLIP's own spelling
    Rule("post_layernorm.*", None),  # of the pooled class token
)
_SIGLIP_RULES = (
    Rule("embeddings.patch_embedding.*", "patch.*"),
    Rule("embeddings.position_embedding.weight", "positions.weight"),
    Rule("embeddings.position_ids", None),
    Rule("post_layernorm.*", None),
    Rule("head.probe", None),
    Rule("head.attention.in_proj_*", None),
    Rule("head.attention.out_proj.*", None),
    Rule("head.layernorm.*", None),
    Rule("head.mlp.fc1.*", None),
    Rule("head.mlp.fc2.*", None),
)
BLOCK_RULES = (
    Rule("layer_norm1.*", "attention_norm.*"),
    Rule("self_attn.q_proj.*", "qkv.q.*"),
    Rule("self_attn.k_proj.*", "qkv.k.*"),
    Rule("self_attn.v_proj.*", "qkv.v.*"),
    Rule("self_attn.out_proj.*", "out.*"),
    Rule("layer_norm2.*", "mlp_norm.*"),
    Rule("mlp.fc1.*", "up.*"),
    Rule("mlp.fc2.*", "down.*"),
)
