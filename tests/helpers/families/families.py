"""The model families under test. A family is proven by all tests that take the fixture `family` or `family_folder`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from transformers import LlavaForConditionalGeneration, Qwen2VLForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, image_settings, load
from tests.helpers.families import (
    family_deepseek_vl_v2,
    family_dots_ocr,
    family_fallback,
    family_llava_next,
    family_llava_onevision,
    family_minicpmv,
    family_mistral3,
    family_mllama,
    family_moe,
    family_qwen2_5_vl,
    family_qwen3_5,
    family_qwen3_vl,
    family_qwen_vl,
)
from tests.helpers.families.made_once import made_once


class ModelFamily(NamedTuple):
    build: Callable[..., Path]  # (folder, *, layout="saved" or "published", seed=0, ...) -> the folder, filled
    image: str  # what a raw prompt says where a picture goes
    reference: Callable[[Path], Reference]
    layouts: tuple[str, ...] = ("saved", "published")


def _llava_reference(folder: Path) -> Reference:
    model, tokenizer = load(LlavaForConditionalGeneration, folder)
    processor = CLIPImageProcessorPil(**image_settings(folder))

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        made = dict(processor(images, return_tensors="pt"))
        return made, ["<image>" * (made["pixel_values"].shape[-1] // 14) ** 2] * len(images)

    return Reference(model, tokenizer, "<image>", read)


def _unknown(build: Callable[..., Path], image: str) -> ModelFamily:
    """One that is not in our table and runs through Transformers' code."""
    return ModelFamily(build, image, family_fallback.reference(image), ("saved",))


FAMILIES: dict[str, ModelFamily] = {
    "qwen_vl": ModelFamily(family_qwen_vl.build, family_qwen_vl.IMAGE, family_qwen_vl.reference, ("published",)),
    "qwen3_5": ModelFamily(family_qwen3_5.build, family_qwen3_5.IMAGE, family_qwen3_5.reference),
    "qwen2_vl": ModelFamily(
        made_once(checkpoints.qwen2_vl),
        "<|vision_start|><|image_pad|><|vision_end|>",
        partial(family_qwen2_5_vl.qwen_reference, Qwen2VLForConditionalGeneration),
    ),
    "qwen2_5_vl": ModelFamily(
        family_qwen2_5_vl.build, "<|vision_start|><|image_pad|><|vision_end|>", family_qwen2_5_vl.reference
    ),
    "qwen3_vl": ModelFamily(
        family_qwen3_vl.build, "<|vision_start|><|image_pad|><|vision_end|>", family_qwen3_vl.reference
    ),
    "qwen3_vl_moe": ModelFamily(family_moe.build_vl, family_moe.IMAGE, family_moe.reference_vl),
    "qwen3_5_moe": ModelFamily(family_moe.build_hybrid, family_moe.IMAGE, family_moe.reference_hybrid),
    "deepseek_vl_v2": ModelFamily(
        family_deepseek_vl_v2.build, family_deepseek_vl_v2.IMAGE, family_deepseek_vl_v2.reference, ("published",)
    ),
    "dots_ocr": ModelFamily(family_dots_ocr.build, family_dots_ocr.IMAGE, family_dots_ocr.reference, ("published",)),
    "minicpmv": ModelFamily(family_minicpmv.build, family_minicpmv.IMAGE, family_minicpmv.reference, ("published",)),
    "deepseek_vl": _unknown(family_fallback.deepseek_vl, "<image_placeholder>"),
    "idefics3": _unknown(family_fallback.idefics3, "<image>"),
    "internvl": _unknown(family_fallback.internvl, "<IMG_CONTEXT>"),
    "llava": ModelFamily(made_once(checkpoints.llava), "<image>\n", _llava_reference),
    "mllama": ModelFamily(family_mllama.build, family_mllama.IMAGE, family_mllama.reference),
    "llava_next": ModelFamily(family_llava_next.build, "<image>\n", family_llava_next.reference),
    "pixtral": ModelFamily(family_mistral3.build_pixtral, "[IMG]", family_mistral3.pixtral_reference),
    "mistral3": ModelFamily(family_mistral3.build, "[IMG]", family_mistral3.reference),
    "ministral3": ModelFamily(family_mistral3.build_ministral, "[IMG]", family_mistral3.reference, ("saved",)),
    "llava_onevision": ModelFamily(family_llava_onevision.build, "<image>\n", family_llava_onevision.reference),
}
