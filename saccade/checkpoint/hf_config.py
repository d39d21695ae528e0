"""The shape of a model that our table does not know: Transformers reads its config.

config.json ──AutoConfig──► attributes ──► the fields that `config.py` reads, in its words
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.checkpoint.hf_processor import auto_config, import_transformers, raised, refusal
from saccade.checkpoint.layouts import reason_not_read
from saccade.checkpoint.settings import setting
from saccade.checkpoint.token_blocks import blocks_of
from saccade.errors import ConfigError

_KEPT = (
    "architectures",
    "dtype",
    "eos_token_id",
    "image_seq_length",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
_TEXT = {  # our name: those that configs have
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": (
        "max_position_embeddings",
        "max_sequence_length",
        "seq_length",
        "n_positions",
    ),
    "intermediate_size": ("intermediate_size", "ffn_dim", "moe_intermediate_size"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
_EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "first_k_dense_replace")
_TOWER = {
    "hidden_size": ("hidden_size", "embed_dim", "width", "vision_hidden_size"),
    "depth": ("num_hidden_layers", "depth", "layers"),
    "num_heads": ("num_attention_heads", "num_heads", "heads"),
    "patch_size": ("patch_size",),
}
_TOKEN_KINDS = ("ernie4_5_vl_moe", "qwen4_exp")  # their decoders take a number for each token
_STATE_KINDS = ("linear_attention", "conv", "mamba")
_STATE_COLUMNS = 64
_REFUSED = {
    "blip": "it captions one picture, which its decoder attends to across and which has no place in a prompt",
    "blip-2": "it captions one picture, which stands before the text and has no place in a prompt",
    "git": "it captions one picture, which stands before the text and has no place in a prompt",
    "idefics": "its layers attend across to pictures, token by token, through gates that ours have not",
    "inkling2": "its attention adds a bias by distance, and convolutions make its keys and values",
    "inkling_mm_model": "its attention adds a bias by distance, and convolutions make its keys and values",
    "instructblip": "it reads the question beside each picture, so that no picture is encoded on its own",
    "kosmos-2": "its decoder adds embeddings of positions that it counts itself",
    "kosmos-2.5": "its decoder adds embeddings of positions that it counts itself",
}
_KERNELS = ("linear_conv_kernel_dim", "conv_L_cache", "conv_kernel", "d_conv")
_TOWER_DEFAULTS = {"hidden_size": 1024, "depth": 24, "num_heads": 16, "patch_size": 14}
_TOWERS = ("vision_config", "vision_model_config", "vit_config", "vq_config")
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "img_context_token_id", "media_placeholder_token_id")


def readable(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json in our words. ConfigError if Transformers cannot read it, or finds no decoder in it."""
    kind = str(raw["model_type"])
    transformers = import_transformers(kind)
    if kind not in import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING:
        raise refusal(kind, _unknown(raw, transformers.__version__))
    try:
        return translated(kind, raw, auto_config(path))
    except ConfigError:
        raise
    except Exception as error:
        raise refusal(kind, f"its config.json cannot be read: {raised(error)}") from error


def _unknown(raw: Mapping[str, Any], version: str) -> str:
    reason = reason_not_read(raw) or f"Transformers {version} has no such model"
    return f"code that comes with a checkpoint is never run, and {reason}" if "auto_map" in raw else reason


def translated(kind: str, raw: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """`config`: its attributes, as Transformers has them."""
    if kind in _REFUSED:
        raise refusal(kind, _REFUSED[kind])
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder and a decoder, and only models that are a decoder alone are served"
        raise refusal(kind, reason)
    fields = {name: raw[name] for name in _KEPT if raw.get(name) is not None}
    fields["model_type"] = kind
    fields["text_config"] = _text(kind, config, config.get_text_config(decoder=True))
    fields["vision_config"] = _tower(kind, config)
    token = _first(config, _IMAGE_TOKENS)
    if token is not None:
        fields["image_token_id"] = token
    return fields


def _text(kind: str, config: Any, text: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {name: _first(text, names) for name, names in _TEXT.items()}
    fields["intermediate_size"] = setting(fields, "intermediate_size", 4 * setting(fields, "hidden_size", 1))
    fields["max_position_embeddings"] = setting(fields, "max_position_embeddings", 8192)
    absent = [name for name, value in fields.items() if value is None]
    if absent:
        raise refusal(kind, f"its config has no {absent[0]}, which a decoder's shape needs")
    heads, dim = max(_kv_shapes(text, fields), key=lambda shape: shape[0] * shape[1])
    fields |= {"num_key_value_heads": heads, "head_dim": dim + dim % 2, "model_type": kind}
    if fields["num_attention_heads"] % heads:
        fields["num_attention_heads"] = heads
    experts = {
        name: value for name in _EXPERTS + _EXPERT_WIDTHS if (value := _number(text, name)) is not None
    }
    rope = dict(getattr(text, "rope_parameters", None) or {})
    flat = {name: value for name, value in rope.items() if not isinstance(value, dict)}
    more = {
        "rope_parameters": flat,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
    }
    return fields | experts | more | {"blocks": blocks_of(kind, text), "states": _states(text)}


def _states(text: Any) -> dict[str, Any] | None:
    """Layers that keep states, and the values that such a layer keeps at most."""
    layers = [i for i, kind in enumerate(_list(text, "layer_types")) if kind in _STATE_KINDS]
    if not layers:
        return None

    of = partial(_size, text)
    kernel = 1 + max(of(name) for name in _KERNELS)
    key_dim = max(of("linear_key_head_dim"), of("linear_head_dim"))
    keys = max(of("linear_num_key_heads"), of("linear_num_heads")) * key_dim
    values = of("linear_num_value_heads") * of("linear_value_head_dim") or keys
    delta_net = values * key_dim + kernel * (2 * keys + values)
    width = of("mamba_num_heads") * of("mamba_head_dim")
    mamba = width * of("ssm_state_size") + kernel * (width + 2 * of("n_groups") * of("ssm_state_size"))
    largest = max(delta_net, mamba, kernel * of("hidden_size")) + _ngram_states(text)
    return {"layers": layers, "rows": -(-largest // _STATE_COLUMNS), "columns": _STATE_COLUMNS}


def _ngram_states(text: Any) -> int:
    """Of layers that embed groups of tokens: ids, and inputs of a convolution over all residual streams."""
    if not _list(text, "ple_layer_ids"):
        return 0
    taps = (text.ple_conv_kernel_size - 1) * text.ngram_size
    return int(text.ngram_size + taps * text.hc_count * text.hidden_size)


def _kv_shapes(text: Any, fields: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Heads and width of keys and values in each kind of layer: a row of the cache holds the widest."""
    heads = fields["num_attention_heads"]
    shared = _size(text, "num_key_value_heads", heads)
    dim = _size(text, "head_dim", fields["hidden_size"] // heads)
    shapes = [(shared, dim)]
    if whole := _number(text, "global_head_dim"):
        shapes.append((_size(text, "num_global_key_value_heads", shared), whole))
    if latent := _number(text, "qk_nope_head_dim"):
        shapes = [(heads, latent + _size(text, "qk_rope_head_dim"))]
        shapes.append((heads, _size(text, "v_head_dim")))
    return shapes


def _tower(kind: str, config: Any) -> dict[str, Any]:
    """What pricing needs. The bridge measures the rest at start."""
    tower = next((part for name in _TOWERS if (part := getattr(config, name, None)) is not None), config)
    fields = {name: _first(tower, names) or _TOWER_DEFAULTS[name] for name, names in _TOWER.items()}
    if fields["hidden_size"] % fields["num_heads"]:
        fields["num_heads"] = 1
    width = _extra_width(kind, config)
    return fields | {"spatial_merge_size": 1, "deepstack_visual_indexes": list(range(width))}


def _extra_width(kind: str, config: Any) -> int:
    """Values of a token beside its embedding, in units of the hidden size: deep features, or embeddings of
    each layer."""
    text = config.get_text_config(decoder=True)
    tower = getattr(config, "vision_config", None)
    lists = [
        (tower, "deepstack_visual_indexes"),
        (config, "deepstack_layer_map"),
        (config, "spatial_target_layers"),
    ]
    features = sum(len(_list(*place)) for place in lists)
    per_layer = _size(text, "hidden_size_per_layer_input") * _size(text, "num_hidden_layers")
    embeddings = -(-per_layer // int(text.hidden_size))
    return features + embeddings + int(kind in _TOKEN_KINDS)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := _number(config, name)) is not None), None)


def _number(config: Any, name: str) -> int | None:
    """An attribute that is a whole number, or a list that starts with one."""
    if name in _list(config, "per_layer_attributes"):  # to ask the config for one is an error
        return max(_size(layer, name) for layer in config.per_layer_config)
    value: Any = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        value = next(iter(value), None)
    return value if type(value) is int else None


def _size(config: Any, name: str, default: int = 0) -> int:
    """A whole number; the default where there is none, or zero."""
    return _number(config, name) or default


def _list(config: Any, name: str) -> Any:
    """A list, or an object of which its length counts, or nothing."""
    return getattr(config, name, None) or ()
