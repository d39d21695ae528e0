"""The model config: config.json as typed shapes of decoder and vision tower. Pure data; opens no file.

Reads both flat configs (`rope_scaling`, text fields at the top level) and the nested ones that Transformers 5
saves (`text_config`, `rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from saccade.checkpoint.compat import normalize
from saccade.checkpoint.defaults import LANGUAGE_TYPE, TEXT_DEFAULTS, TOWER_DEFAULTS, VISION_DEFAULTS
from saccade.checkpoint.late_interaction import TOKEN_DIM
from saccade.checkpoint.moe_config import MoEConfig, first_of, moe_config
from saccade.checkpoint.schema import CONFIG, GENERATION, Table, first_wrong
from saccade.checkpoint.settings import setting, without_nulls
from saccade.checkpoint.token_blocks import Blocks
from saccade.errors import ConfigError


def check_values(file: str, values: Mapping[str, Any], table: Table) -> None:
    """Refuse a checkpoint file in which a value has not the type that the table gives."""
    if wrong := first_wrong(values, table):
        raise ConfigError(f"{file}: {wrong}")


_NOT_OF_TEXT = {"text_config", "language_config", "vision_config", "model_type"}


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Layers with a recurrent state instead of a KV cache: gated delta nets; without keys, convolutions."""

    layers: tuple[int, ...]  # indices
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # width of the causal convolution

    @property
    def channels(self) -> int:
        """Width of the concatenated queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def is_convolution(self) -> bool:
        return not self.key_heads


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention: the KV cache holds one latent vector per token, for all heads."""

    kv_lora_rank: int  # of the latent vector
    qk_rope_head_dim: int  # rotated part of the key, cached beside it and shared by all heads
    qk_nope_head_dim: int  # part of a head's query and key without RoPE
    v_head_dim: int
    q_lora_rank: int | None  # None: queries are projected from the layer's input directly


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder's shape."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...] | None  # M-RoPE frequencies per axis; None for RoPE
    rope_scaling: Mapping[str, Any]  # the other keys of rope_scaling / rope_parameters
    tie_word_embeddings: bool
    model_type: str
    window: int | None = None  # sliding or chunked attention in some layers; None: full attention
    num_cross_layers: int = 0  # layers with cross-attention to images instead of self-attention
    linear: LinearConfig | None = None
    experts: MoEConfig | None = None
    num_deepstack: int = 0  # extra vectors per image embedding; number k is added after decoder layer k
    rope_switch: int | None = None  # LongRoPE: longer prompts use the long factors; None: no LongRoPE
    token_dim: int | None = None  # of late interaction: width of a token's vector; None: no such model
    mla: MLAConfig | None = None  # then the KV cache has one head, whose vector is key and value
    blocks: Blocks | None = None  # tokens that see tokens after them; None: there are none

    @property
    def max_context(self) -> int:
        """Positions for which full attention, the only kind here, equals the model's own."""
        return min(filter(None, (self.max_position, self.window)))

    @property
    def num_kv_layers(self) -> int:
        """Layers with a KV cache."""
        return self.num_layers - self.num_cross_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def embedding_size(self) -> int:
        """Width of the tower's output for one slot."""
        return self.hidden_size * (1 + self.num_deepstack)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower's shape."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    in_channels: int
    image_size: int | None  # side of the square input, for towers that take one size only
    spatial_merge_size: int  # patches per token along each side
    temporal_patch_size: int  # frames per patch
    hidden_act: str
    is_gated: bool = False  # gated MLP, such as SwiGLU
    window_size: int | None = None  # side of an attention window, in pixels; None: full attention
    full_layers: tuple[int, ...] = ()  # with windows: the layers of full attention
    deepstack_layers: tuple[int, ...] = ()  # layers with an additional output to the decoder
    takes_squares: bool = False  # only inputs of `image_size`, although patches are merged after the tower
    projector: tuple[int, ...] = ()  # hidden widths of the projector; empty: one, as wide as merged patches

    @property
    def window_tokens(self) -> int | None:
        """Tokens along one side of an attention window."""
        return self.window_size // self.patch_size // self.spatial_merge_size if self.window_size else None

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int | None
    video_token_id: int | None
    dtype: str  # as the checkpoint was saved: "float32", "bfloat16", "float16"
    eos_token_ids: frozenset[int]
    raw: Mapping[str, Any] = field(repr=False)  # config.json, for fields of one family
    is_bridged: bool = False  # the model runs through Transformers' code
    is_on_paper: bool = False  # and that library was not asked


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any] = MappingProxyType({})) -> ModelConfig:
    """Read config.json, and generation_config.json for its EOS ids."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        message = "config.json has no model_type, so this is not a Hugging Face checkpoint Saccade can read"
        raise ConfigError(message)
    try:
        check_values("config.json", raw, CONFIG)
        check_values("generation_config.json", generation, GENERATION)
        return _read(model_type, *normalize(without_nulls(raw), generation))
    except ConfigError as error:
        raise ConfigError(f"{error} (model_type {model_type!r})") from None


def _read(model_type: str, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    nested = setting(raw, "text_config", raw.get("language_config", {}))
    kind = setting(nested, "model_type", LANGUAGE_TYPE if "language_config" in raw else model_type)
    flat = {name: value for name, value in raw.items() if name not in _NOT_OF_TEXT}
    text = {**TEXT_DEFAULTS.get(kind, {}), **flat, "model_type": kind, **nested}
    vision = raw.get("vision_config", {})
    dtype = first_of(raw, "dtype", "torch_dtype") or first_of(text, "dtype", "torch_dtype") or "float32"
    return ModelConfig(
        model_type=model_type,
        text=_text_config(text, raw, len(vision.get("deepstack_visual_indexes", ()))),
        vision=_vision_config({**_projector_fields(raw), **vision}) if vision else None,
        image_token_id=first_of(raw, "image_token_id", "image_token_index"),
        video_token_id=first_of(raw, "video_token_id", "video_token_index"),
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=_eos_ids(generation, raw, text),
        raw=raw,
    )


def _text_config(text: Mapping[str, Any], raw: Mapping[str, Any], num_deepstack: int) -> TextConfig:
    heads = _need(text, "num_attention_heads")
    hidden = _need(text, "hidden_size")
    rope = {**text.get("rope_scaling", {}), **text.get("rope_parameters", {})}
    section = rope.pop("mrope_section", None)
    theta = rope.pop("rope_theta", text.get("rope_theta", 10000.0))
    # Some published configs have false at the top and true in text_config; the head is then not stored.
    tie = setting(raw, "tie_word_embeddings", text.get("tie_word_embeddings"))
    mla = _mla_config(text)
    return TextConfig(
        hidden_size=hidden,
        intermediate_size=_need(text, "intermediate_size", "moe_intermediate_size"),
        num_layers=_need(text, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=1 if mla else _kv_heads(text, heads),
        head_dim=mla.kv_lora_rank + mla.qk_rope_head_dim if mla else _head_dim(text, hidden, heads),
        vocab_size=_need(text, "vocab_size"),
        max_position=_need(text, "max_position_embeddings"),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        mrope_section=tuple(section) if section else None,
        rope_scaling=rope,
        tie_word_embeddings=bool(tie),
        model_type=text.get("model_type", raw["model_type"]),
        window=_window(text),
        linear=_linear_config(text),
        experts=moe_config(text, _need(text, "num_hidden_layers")),
        num_cross_layers=len(text.get("cross_attention_layers", ())),
        num_deepstack=num_deepstack,
        rope_switch=_rope_switch(rope, text),
        token_dim=raw.get(TOKEN_DIM),
        mla=mla,
        blocks=text.get("blocks"),
    )


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    shared = _need(text, "num_key_value_heads", "num_attention_heads")
    if heads % shared:
        reason = f"{heads} attention heads cannot share {shared} key-value heads evenly"
        raise ConfigError(f"config.json: {reason} (num_attention_heads, num_key_value_heads)")
    return shared


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Even, since RoPE rotates pairs."""
    dim: int | None = text.get("head_dim")
    if dim is None:
        if hidden % heads:
            message = f"config.json: hidden_size={hidden} is not divided by num_attention_heads={heads}"
            raise ConfigError(message)
        dim = hidden // heads
    if dim % 2:
        message = f"config.json: heads have {dim} values (head_dim, or hidden_size by heads), an odd number"
        raise ConfigError(message)
    return dim


def _mla_config(text: Mapping[str, Any]) -> MLAConfig | None:
    if not text.get("use_mla"):
        return None
    return MLAConfig(
        kv_lora_rank=_need(text, "kv_lora_rank"),
        qk_rope_head_dim=_need(text, "qk_rope_head_dim"),
        qk_nope_head_dim=_need(text, "qk_nope_head_dim"),
        v_head_dim=_need(text, "v_head_dim"),
        q_lora_rank=setting(text, "q_lora_rank", None),
    )


def _rope_switch(rope: Mapping[str, Any], text: Mapping[str, Any]) -> int | None:
    if first_of(rope, "rope_type", "type") != "longrope":
        return None
    names = ("original_max_position_embeddings", "max_position_embeddings")
    context: int | None = first_of({**text, **rope}, *names)
    return context


def _window(text: Mapping[str, Any]) -> int | None:
    layers = setting(text, "layer_types", ["sliding_attention"])  # older configs have one kind
    if "chunked_attention" in layers:
        return text.get("attention_chunk_size")
    if "sliding_attention" not in layers:
        return None
    return text.get("sliding_window") if text.get("use_sliding_window", True) else None


def _linear_config(text: Mapping[str, Any]) -> LinearConfig | None:
    if states := text.get("states"):  # of layers that run through Transformers' code
        return LinearConfig(tuple(states["layers"]), 0, 1, states["rows"], states["columns"], 1)
    if text.get("linear_num_value_heads") is None:
        return None
    every = text.get("full_attention_interval", 4)
    kinds = setting(text, "layer_types", ["linear_attention"] * (every - 1) + ["full_attention"])
    is_linear = [kind == "linear_attention" for kind in kinds]
    return LinearConfig(
        layers=tuple(i for i in range(_need(text, "num_hidden_layers")) if is_linear[i % len(is_linear)]),
        key_heads=_need(text, "linear_num_key_heads"),
        value_heads=_need(text, "linear_num_value_heads"),
        key_dim=_need(text, "linear_key_head_dim"),
        value_dim=_need(text, "linear_value_head_dim"),
        kernel=_need(text, "linear_conv_kernel_dim"),
    )


def _vision_config(config: Mapping[str, Any]) -> VisionConfig:
    vision = {**VISION_DEFAULTS, **TOWER_DEFAULTS.get(config.get("model_type", ""), {}), **config}
    hidden = first_of(vision, "embed_dim", "hidden_size", "width")
    if hidden is None:
        raise ConfigError("config.json: vision_config has none of embed_dim, hidden_size and width")
    if not isinstance(hidden, int):
        message = f"config.json: vision_config has several towers ({', '.join(hidden)}); one is supported"
        raise ConfigError(message)
    patch = _side(vision, "patch_size") or 0
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=vision.get("intermediate_size", max(1, int(hidden * vision.get("mlp_ratio", 4)))),
        num_layers=_need(vision, "depth", "num_hidden_layers", "layers") + vision.get("num_global_layers", 0),
        num_heads=_vision_heads(vision, hidden),
        patch_size=patch,
        in_channels=vision["in_channels"],  # 3 under each of its names
        image_size=_image_size(vision, patch),
        spatial_merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        hidden_act=vision["hidden_act"],
        # No config field says it, but towers with SiLU have gated MLPs.
        is_gated=vision.get("is_gated", vision["hidden_act"] == "silu"),
        window_size=vision.get("window_size") if "fullatt_block_indexes" in vision else None,
        full_layers=tuple(vision.get("fullatt_block_indexes", ())),
        deepstack_layers=tuple(vision.get("deepstack_visual_indexes", ())),
        takes_squares=vision.get("takes_squares", False),
        projector=tuple(vision.get("projector_widths", ())),
    )


def _projector_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the tower's shape that are outside vision_config if a projector merges the patches."""
    if "projector_config" in raw:
        projector = raw["projector_config"]
        width = projector.get("n_embed", 2048) * projector.get("mlp_ratio", 1)
        widths = [width] * (projector.get("depth", 2) - 1)
        return {"spatial_merge_size": projector.get("downsample_ratio", 2), "projector_widths": widths}
    return {name: raw[name] for name in ("spatial_merge_size",) if name in raw}


def _vision_heads(vision: Mapping[str, Any], hidden: int) -> int:
    heads = _need(vision, "num_heads", "num_attention_heads", "attention_heads", "heads")
    if hidden % heads:
        reason = f"width {hidden} does not divide into {heads} heads (num_heads or num_attention_heads)"
        raise ConfigError(f"config.json: vision_config: {reason}")
    return heads


def _image_size(vision: Mapping[str, Any], patch: int) -> int | None:
    side = _side(vision, "image_size")
    if side is not None and side < patch:
        raise ConfigError(f"config.json: vision_config.image_size={side} is less than one patch_size={patch}")
    return side


def _side(vision: Mapping[str, Any], name: str) -> int | None:
    """The side of a square, which some checkpoints write as two equal values."""
    size = vision.get(name)
    if not isinstance(size, list):
        return size
    if len(set(size)) != 1:
        raise ConfigError(f"config.json: vision_config.{name} {size} is no square")
    return int(size[0])


def _need(values: Mapping[str, Any], *names: str) -> int:
    number: int | None = first_of(values, *names)
    if number is None:
        raise ConfigError(f"config.json has no {' or '.join(names)}, which the model's shape needs")
    if number < 1:
        raise ConfigError(f"config.json: {' or '.join(names)} comes to {number}; at least 1 is needed")
    return number


def _eos_ids(*sources: Mapping[str, Any]) -> frozenset[int]:
    """EOS ids of the first source that has any: generation_config.json, config.json, text_config."""
    for source in sources:
        match source.get("eos_token_id"):
            case list(ids):
                return frozenset(ids)
            case int(token):
                return frozenset((token,))
    return frozenset()
