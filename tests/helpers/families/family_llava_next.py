"""A small LLaVA-NeXT folder and Transformers' way of reading pictures for it. Tiles of 56x56 pixels, 4x4 patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, image_settings, load
from tests.helpers.families.made_once import made_once

TILE = 56
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]  # height, width
PROCESSOR = {
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "processor_class": "LlavaNextProcessor",
}
IMAGE_PROCESSOR = {
    "image_processor_type": "LlavaNextImageProcessor",
    **checkpoints.IMAGE_PROCESSOR,
    "aspect_ratio_setting": "anyres",
    "crop_size": {"height": TILE, "width": TILE},
    "do_center_crop": True,
    "image_grid_pinpoints": PINPOINTS,
    "size": {"shortest_edge": TILE},
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": TILE,
    "patch_size": 14,
    "projection_dim": 32,
}


def text_fields(kind: str, tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """A small decoder of the given type."""
    return {
        **checkpoints.TEXT,
        "model_type": kind,
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.get_vocab_size() + 6,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **({"sliding_window": None} if kind == "mistral" else {}),
        **more,
    }


def text_config(kind: str, tokenizer: Tokenizer, **more: Any) -> Any:
    fields = text_fields(kind, tokenizer, **more)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@made_once
def build(folder: Path, *, layout: str = "saved", seed: int = 0, decoder: str = "mistral", **text: Any) -> Path:
    """CLIP tower, projector, newline, a Mistral decoder with grouped heads."""
    tokenizer = checkpoints.llama_tokenizer()
    config = LlavaNextConfig(
        text_config=text_config(decoder, tokenizer, **text),
        vision_config=CLIPVisionConfig(**VISION),
        image_token_index=tokenizer.token_to_id("<image>"),
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=False,
    )
    save_tiled(LlavaNextForConditionalGeneration, config, folder, layout, seed, IMAGE_PROCESSOR, PROCESSOR)
    template = checkpoints.LLAVA_TEMPLATE
    checkpoints._write_tokenizer(folder, tokenizer, template, layout, eos="</s>", pad="<pad>", bos="<s>")
    return folder


def save_tiled(
    kind: Any, config: Any, folder: Path, layout: str, seed: int, images: dict[str, Any], processor: dict[str, Any]
) -> None:
    """The model, and what the hub or Transformers says of its images."""
    checkpoints._save_model(kind, config, folder, seed, "5GB")
    if layout == "published":
        checkpoints._publish(folder, checkpoints.LLAVA_OLD_NAMES, flatten=False)
        checkpoints._write(folder / "preprocessor_config.json", images)
        checkpoints._write(folder / "processor_config.json", processor)
    else:
        checkpoints._write(folder / "processor_config.json", {"image_processor": images, **processor})


def hf_processor(folder: Path, tokenizer: Any, **changes: Any) -> LlavaNextProcessor:
    settings = {k: v for k, v in PROCESSOR.items() if k != "processor_class"}
    return LlavaNextProcessor(
        LlavaNextImageProcessorPil(**{**image_settings(folder), **changes}), tokenizer, **settings
    )


def reference(folder: Path) -> Reference:
    model, tokenizer = load(LlavaNextForConditionalGeneration, folder)
    return tiled_reference(model, tokenizer, hf_processor(folder, tokenizer))


def tiled_reference(model: Any, tokenizer: Any, processor: Any) -> Reference:
    """For models whose images are tiles of `<image>`."""

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        made = dict(processor.image_processor(images, return_tensors="pt"))
        spelled = [processor.replace_image_token(made, index) for index in range(len(images))]
        made.pop("batch_num_images", None)  # every image is one sample: the default
        return made, spelled

    return Reference(model, tokenizer, "<image>", read)
