"""The schema of a checkpoint's JSON files: types and bounds of all fields that are read. Null is absent."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from saccade.checkpoint.late_interaction import TOKEN_DIM
from saccade.errors import is_int_within, is_number_within

_MAXIMUM = 4096  # values in a list of any length: as many as layers


class Kind(NamedTuple):
    description: str
    takes: Callable[[Any], bool]


Table = Mapping[str, "Kind | Table"]
"""Field name -> kind, or a table for a nested object."""


def first_wrong(values: Mapping[str, Any], table: Table, inside: str = "") -> str | None:
    """One sentence on the first value that is of another kind; None if there is none."""
    for name, kind in table.items():
        value = values.get(name)
        if value is None:
            continue
        if isinstance(kind, Kind):
            if not kind.takes(value):
                return _sentence(inside + name, value, kind.description)
        elif not isinstance(value, Mapping):
            return _sentence(inside + name, value, "an object")
        elif wrong := first_wrong(value, kind, f"{inside}{name}."):
            return wrong
    return None


def _sentence(name: str, value: Any, description: str) -> str:
    text = repr(value)
    sentence = f"{name} is {text[:80]}{'...' * (len(text) > 80)}, but {description} is needed"
    match value:
        case list() if len(value) > _MAXIMUM:
            return f"{sentence}, with at most {_MAXIMUM} values, not {len(value)}"
    return sentence


def whole(minimum: int, maximum: int) -> Kind:
    """An integer. The bounds are far beyond published values; they keep a typo from filling the memory."""
    description = f"{minimum}" if minimum == maximum else f"a whole number from {minimum} to {maximum}"
    return Kind(description, lambda v: is_int_within(v, minimum, maximum))


def number(*, above: float = -math.inf, minimum: float = -math.inf, maximum: float = math.inf) -> Kind:
    bounds = {"above": above, "of at least": minimum, "of at most": maximum}
    description = "a number" + "".join(f" {words} {at}" for words, at in bounds.items() if math.isfinite(at))
    low, high = max(minimum, -sys.float_info.max), min(maximum, sys.float_info.max)  # a float can hold it
    return Kind(description, lambda v: is_number_within(v, low, high) and v > above)


def list_of(kind: Kind, count: int | None = None) -> Kind:
    times, lengths = (
        ("", range(_MAXIMUM + 1)) if count is None else (f"{count} times ", range(count, count + 1))
    )
    return Kind(
        f"a list of {times}{kind.description}",
        lambda v: isinstance(v, list) and len(v) in lengths and all(map(kind.takes, v)),
    )


def either(*kinds: Kind) -> Kind:
    return Kind(
        " or ".join(kind.description for kind in kinds), lambda v: any(kind.takes(v) for kind in kinds)
    )


def sides(kind: Kind) -> Kind:
    """The sides of an image, by name."""
    return Kind(
        f"an object with {kind.description} for each side",
        lambda v: isinstance(v, Mapping) and all(side is None or kind.takes(side) for side in v.values()),
    )


FLAG = Kind("true or false", lambda v: isinstance(v, bool))
WORD = Kind("a string", lambda v: isinstance(v, str))
OBJECT = Kind("an object", lambda v: isinstance(v, Mapping))
WIDTH = whole(1, 1 << 24)
MAYBE_WIDTH = whole(0, 1 << 24)
LAYERS = whole(1, 4096)
LAYER = whole(0, 4095)
ANY_LAYER = whole(-4096, 4095)  # negative: from the end
HEADS = whole(1, 1 << 16)
MAYBE_COUNT = whole(0, 1 << 16)
LENGTH = whole(1, (1 << 31) - 1)
TOKEN = whole(0, (1 << 31) - 1)
TOKENS = either(whole(-1, (1 << 31) - 1), list_of(whole(-1, (1 << 31) - 1)))  # -1: none
SIDE = whole(1, 1 << 16)
SQUARE = either(SIDE, list_of(SIDE, 2))
AREA = LENGTH
MERGE = whole(1, 64)
CHANNELS = whole(3, 3)  # RGB
TILES = whole(1, 256)
PAIRS = list_of(list_of(SIDE, 2))
ABOVE_ZERO = number(above=0)
NON_NEGATIVE = number(minimum=0)
THETA = number(above=1)


ROPE: Table = {
    "rope_theta": THETA,
    "mrope_section": list_of(whole(0, 1 << 16)),
    **dict.fromkeys(("mrope_interleaved", "truncate"), FLAG),
    **dict.fromkeys(("type", "rope_type"), WORD),
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow"), ABOVE_ZERO),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ABOVE_ZERO),
    **dict.fromkeys(("llama_4_scaling_beta", "mscale", "mscale_all_dim"), NON_NEGATIVE),
    "original_max_position_embeddings": LENGTH,
    "partial_rotary_factor": number(above=0, maximum=1),
}
EXPERTS: Table = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), MAYBE_COUNT),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts", "n_group", "topk_group"), MAYBE_COUNT),
    **dict.fromkeys(("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq"), MAYBE_COUNT),
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": MAYBE_WIDTH,
    "mlp_only_layers": list_of(LAYER),
    "norm_topk_prob": FLAG,
    **dict.fromkeys(("scoring_func", "topk_method"), WORD),
    "routed_scaling_factor": ABOVE_ZERO,
}
TEXT: Table = {
    **EXPERTS,
    **dict.fromkeys(("model_type", "dtype", "torch_dtype", "hidden_act"), WORD),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim", "kv_channels"), WIDTH),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), MAYBE_WIDTH),  # 0 without MLA
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), MAYBE_WIDTH),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("attention_bias", "mlp_bias", "no_bias", "tie_word_embeddings"), FLAG),
    **dict.fromkeys(("use_sliding_window", "use_mla", "use_dynamic_ntk", "use_logn_attn"), FLAG),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), NON_NEGATIVE),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), THETA),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE),
    **dict.fromkeys(("num_hidden_layers", "full_attention_interval"), LAYERS),
    "layer_types": list_of(WORD),
    "cross_attention_layers": list_of(LAYER),
    "sliding_window": TOKEN,
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), LENGTH),
    **dict.fromkeys(("seq_length", "attention_chunk_size"), LENGTH),
    "rotary_pct": number(above=0, maximum=1),
    "eos_token_id": TOKENS,
}
VISION: Table = {
    **dict.fromkeys(("model_type", "hidden_act"), WORD),
    # an object: several towers
    **dict.fromkeys(("embed_dim", "hidden_size", "width"), either(WIDTH, OBJECT)),
    **dict.fromkeys(("intermediate_size", "output_dim", "n_queries", "num_position_embeddings"), WIDTH),
    **dict.fromkeys(("depth", "num_hidden_layers", "layers"), LAYERS),
    **dict.fromkeys(("num_heads", "num_attention_heads", "attention_heads", "heads"), HEADS),
    **dict.fromkeys(("in_channels", "in_chans", "num_channels"), CHANNELS),
    **dict.fromkeys(("patch_size", "image_size"), SQUARE),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), MERGE),
    **dict.fromkeys(("fullatt_block_indexes", "deepstack_visual_indexes"), list_of(LAYER)),
    "intermediate_layers_indices": list_of(LAYER),
    **dict.fromkeys(("layer_norm_eps", "norm_eps", "rms_norm_eps"), NON_NEGATIVE),
    **dict.fromkeys(("use_bias", "post_norm"), FLAG),
    "mlp_ratio": number(above=0, maximum=1024),
    "num_global_layers": LAYER,
    "window_size": SIDE,
    "tokens_per_second": ABOVE_ZERO,
    "image_start_id": TOKEN,
    "max_num_tiles": TILES,
    "supported_aspect_ratios": PAIRS,
    "rope_theta": THETA,
    "rope_parameters": ROPE,
}
VISUAL: Table = {**VISION, "width": WIDTH, "patch_size": SIDE, "image_size": SIDE}  # of the first Qwen-VL
PROJECTOR: Table = {
    **dict.fromkeys(("n_embed", "input_dim"), WIDTH),
    **dict.fromkeys(("mlp_ratio", "depth", "downsample_ratio"), MERGE),
    "projector_type": WORD,
    "token_pooling": FLAG,
}
CONFIG: Table = {
    **TEXT,
    "text_config": TEXT,
    "language_config": TEXT,
    "vision_config": VISION,
    "visual": VISUAL,
    "projector_config": PROJECTOR,
    "quantization_config": {"quant_method": WORD},
    **dict.fromkeys(("image_token_id", "image_token_index", "video_token_id", "video_token_index"), TOKEN),
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), TOKEN),
    **dict.fromkeys(("vision_feature_select_strategy", "vision_aspect_ratio", "projector_hidden_act"), WORD),
    **dict.fromkeys(("tile_tag", "global_view_pos"), WORD),
    **dict.fromkeys(("image_grid_pinpoints", "candidate_resolutions"), PAIRS),
    "vision_feature_layer": either(ANY_LAYER, list_of(ANY_LAYER)),
    "multimodal_projector_bias": FLAG,
    "spatial_merge_size": MERGE,
    TOKEN_DIM: WIDTH,
}
GENERATION: Table = {"eos_token_id": TOKENS, "chat_format": WORD}


IMAGES: Table = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_pad"), FLAG),
    **dict.fromkeys(("size", "crop_size"), either(SIDE, sides(AREA))),
    **dict.fromkeys(("min_pixels", "max_pixels", "max_video_tokens"), AREA),
    **dict.fromkeys(("min_frames", "max_frames"), SIDE),
    **dict.fromkeys(("merge_size", "temporal_patch_size"), MERGE),
    "patch_size": either(SIDE, sides(SIDE)),
    "resample": whole(0, 5),
    "rescale_factor": ABOVE_ZERO,
    "image_mean": list_of(number(), 3),
    "image_std": list_of(ABOVE_ZERO, 3),
    "max_image_tiles": TILES,
    "image_grid_pinpoints": PAIRS,
    **dict.fromkeys(("cap_pixels_per_frame", "slice_mode", "use_image_id"), FLAG),
    "max_slice_nums": whole(1, 64),
    "scale_resolution": whole(1, 4096),
    "image_feature_size": WIDTH,
    "norm_mean": list_of(number(), 3),
    "norm_std": list_of(ABOVE_ZERO, 3),
}
PROCESSOR: Table = {
    "image_processor": IMAGES,
    "video_processor": IMAGES,
    "image_mean": list_of(number(minimum=0, maximum=1), 3),
    "image_std": IMAGES["image_std"],
    **dict.fromkeys(("image_token", "image_break_token", "image_end_token"), WORD),
    **dict.fromkeys(("vision_feature_select_strategy", "vision_aspect_ratio"), WORD),
    "patch_size": SIDE,
    "num_additional_image_tokens": MAYBE_COUNT,
    "candidate_resolutions": PAIRS,
    "downsample_ratio": MERGE,
    "normalize": FLAG,
    **dict.fromkeys(("visual_prompt_prefix", "query_prefix"), WORD),
}
