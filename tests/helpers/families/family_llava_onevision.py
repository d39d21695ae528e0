"""A small LLaVA-OneVision folder and Transformers' way of reading pictures for it.

Tiles of 60 pixels are not whole patches of 14 (384 are not either), and more than four tiles' patches are reduced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    SiglipVisionConfig,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, image_settings, load
from tests.helpers.families.family_llava_next import save_tiled, text_config, tiled_reference
from tests.helpers.families.made_once import made_once

TILE = 60
PINPOINTS = [[TILE * rows, TILE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
PROCESSOR = {
    "image_token": "<image>",
    "num_image_tokens": 16,
    "video_token": "<video>",
    "vision_aspect_ratio": "anyres_max_4",
    "vision_feature_select_strategy": "full",
    "processor_class": "LlavaOnevisionProcessor",
}
IMAGE_PROCESSOR = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    **checkpoints.IMAGE_PROCESSOR,
    "do_pad": True,
    "image_grid_pinpoints": PINPOINTS,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"height": TILE, "width": TILE},
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 14,
    "vision_use_head": False,
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@made_once
def build(folder: Path, *, layout: str = "saved", seed: int = 0, vision: dict[str, Any] | None = None) -> Path:
    """SigLIP tower, projector, newline, a Qwen2 decoder with biases and grouped heads."""
    tokenizer = checkpoints.qwen_tokenizer()
    tokenizer.add_special_tokens(["<image>", "<video>"])
    config = LlavaOnevisionConfig(
        text_config=text_config("qwen2", tokenizer),
        vision_config=SiglipVisionConfig(**{**VISION, **(vision or {})}),
        image_token_index=tokenizer.token_to_id("<image>"),
        video_token_index=tokenizer.token_to_id("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_4",
        tie_word_embeddings=False,
    )
    save_tiled(LlavaOnevisionForConditionalGeneration, config, folder, layout, seed, IMAGE_PROCESSOR, PROCESSOR)
    checkpoints._write_tokenizer(folder, tokenizer, TEMPLATE, layout, eos="<|im_end|>", pad="<|endoftext|>")
    return folder


class ImagesOnly(LlavaOnevisionProcessor):
    """Transformers' processor without its video part, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        return None


def hf_processor(tokenizer: Any, **changes: Any) -> LlavaOnevisionProcessor:
    settings = {**{k: v for k, v in PROCESSOR.items() if k != "processor_class"}, **changes}
    images = settings.pop("image_processor", None) or LlavaOnevisionImageProcessorPil()
    return ImagesOnly(images, tokenizer, None, **settings)


def reference(folder: Path) -> Reference:
    model, tokenizer = load(LlavaOnevisionForConditionalGeneration, folder)
    images = LlavaOnevisionImageProcessorPil(**image_settings(folder))
    return tiled_reference(model, tokenizer, hf_processor(tokenizer, image_processor=images))
