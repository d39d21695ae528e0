"""The registry of model families: model type -> multimodal rules, video rules, built-in chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from saccade.checkpoint.config import ModelConfig
from saccade.errors import member
from saccade.processor.families import deepseek_vl_v2, frame_groups, qwen_vl
from saccade.processor.families.base import Family, Files
from saccade.processor.families.deepseek_vl_v2 import DeepseekVL2
from saccade.processor.families.dots_ocr import DotsOCR
from saccade.processor.families.fallback import Fallback
from saccade.processor.families.frame_groups import VideoRules
from saccade.processor.families.llava import Llava
from saccade.processor.families.llava_next import LlavaNext
from saccade.processor.families.llava_onevision import LlavaOnevision
from saccade.processor.families.minicpmv import MiniCPMV
from saccade.processor.families.mistral3 import Mistral3
from saccade.processor.families.mllama import Mllama
from saccade.processor.families.qwen2_vl import Qwen2VL
from saccade.processor.families.qwen_vl import QwenVL
from saccade.processor.families.ruled import Ruled
from saccade.processor.families.text import Text

_QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

FAMILIES: dict[str, type[Family]] = {
    "deepseek_v2": Text,
    "deepseek_vl_v2": DeepseekVL2,
    "dots_ocr": DotsOCR,
    "llava": Llava,
    "llava/pixtral": Mistral3,  # model type/tower type
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOnevision,
    "minicpmv": MiniCPMV,
    "mistral3": Mistral3,
    "mllama": Mllama,
    "qwen": Text,
    "qwen/qwen_visual": QwenVL,
    **dict.fromkeys(_QWEN_VL, Qwen2VL),
    **dict.fromkeys(("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe"), Text),
}

VIDEO: dict[str, Callable[[Files], VideoRules | None]] = {
    "qwen2_vl": frame_groups.qwen2_vl,
    "qwen2_5_vl": frame_groups.qwen2_5_vl,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), frame_groups.qwen3_vl),
}
"""Families that take video."""

TEMPLATES: dict[str, Callable[[ModelConfig], str | None]] = {
    "deepseek_vl_v2": deepseek_vl_v2.chat_template,
    **dict.fromkeys(("deepseek_ocr2", "unlimited_ocr"), deepseek_vl_v2.ocr_template),
    "qwen": qwen_vl.chat_template,
    "qwen/qwen_visual": qwen_vl.chat_template,
}
"""Chat templates of families whose checkpoints ship none."""


_LLAVA_DECODERS = ("llama", "mistral", "qwen2")
DECODERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), _LLAVA_DECODERS),
    "mistral3": (*_LLAVA_DECODERS, "ministral3"),
}
"""Decoders that our code has of families that may have others."""


def is_ours(raw: Mapping[str, Any]) -> bool:
    """Whether our code serves a checkpoint with this config.json. Others run through Transformers' code."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        return False
    if (kind, raw.get("vision_feature_select_strategy")) == ("llava_next", "full"):
        return False
    decoder = member(raw.get("text_config"), "model_type")
    return decoder is None or decoder in DECODERS.get(kind, (decoder,))


def video_rules_for(files: Files) -> VideoRules | None:
    make = None if files.config.is_bridged else VIDEO.get(files.config.model_type)
    return make(files) if make else None


def family_for(config: ModelConfig) -> type[Family]:
    """The family's rules, or the fallback through Transformers' own processor; on paper a counting rule."""
    if is_known(config):
        return FAMILIES[name_of(config)]
    return Ruled if config.is_on_paper else Fallback


def is_known(config: ModelConfig) -> bool:
    return not config.is_bridged and name_of(config) in FAMILIES


def built_in_template(config: ModelConfig) -> str | None:
    """The chat template of a checkpoint that ships none; None if there is none here either."""
    make = TEMPLATES.get(name_of(config))
    return make(config) if make else None


def name_of(config: ModelConfig) -> str:
    """The model type, with the tower's type where the table has such an entry."""
    with_tower = f"{config.model_type}/{member(config.raw.get('vision_config'), 'model_type')}"
    return with_tower if with_tower in FAMILIES else config.model_type


def default_video_rules() -> VideoRules:
    return frame_groups.published()


def default_family() -> Family:
    """The rules when no model is named: the published Qwen2-VL."""
    return Qwen2VL.published()
