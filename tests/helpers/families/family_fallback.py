"""Small checkpoints of families that our table does not know, and what Transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import (
    AutoModelForImageTextToText,
    AyaVisionConfig,
    DeepseekVLConfig,
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    PreTrainedTokenizerFast,
)

from benchmarks.checkpoints import _write, _write_tokenizer, qwen_tokenizer, randomise
from saccade.checkpoint.hf_processor import load_processor
from tests.helpers.engine.reference import Reference
from tests.helpers.families.made_once import made_once

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
)
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SWITCH = 48  # tokens beyond which the rope below turns a prompt by its long factors
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 3.0 * i for i in range(8)],
}
VISION = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer_with(*more: str) -> Tokenizer:
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in more])
    return tokenizer


def text_shape(tokenizer: Tokenizer) -> dict[str, Any]:
    return {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 3}


def save(
    folder: Path, config: Any, tokenizer: Tokenizer, processor: dict[str, Any], placeholder: str, **named: str
) -> Path:
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    randomise(model, 0)
    model.save_pretrained(folder)
    _write(folder / "processor_config.json", processor)
    _write_tokenizer(
        folder,
        tokenizer,
        TEMPLATE.replace("IMAGE", placeholder),
        "saved",
        eos="<|im_end|>",
        pad="<|endoftext|>",
        **named,
    )
    return folder


@made_once
def idefics3(folder: Path, *, layout: str = "saved", seed: int = 0, rope: Mapping[str, Any] | None = None) -> Path:
    rows = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    tokenizer = tokenizer_with("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows)
    config = Idefics3Config(
        text_config={**text_shape(tokenizer), "pad_token_id": 0, **({"rope_parameters": dict(rope)} if rope else {})},
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        scale_factor=2,
        image_token_id=tokenizer.token_to_id("<image>"),
        tie_word_embeddings=False,
    )
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 168},
        "max_image_size": {"longest_edge": 56},
        "do_image_splitting": True,
        "resample": 1,
    }
    processor = {"processor_class": "Idefics3Processor", "image_processor": images, "image_seq_len": 4}
    return save(folder, config, tokenizer, processor, "<image>")


@made_once
def internvl(folder: Path, *, layout: str = "saved", seed: int = 0) -> Path:
    tokenizer = tokenizer_with("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    config = InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": tokenizer.get_vocab_size() + 3},
        vision_config={**VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokenizer.token_to_id("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 56, "width": 56},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 6,
    }
    processor = {"processor_class": "InternVLProcessor", "image_processor": images, "image_seq_length": 4}
    named = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    return save(folder, config, tokenizer, processor, "<IMG_CONTEXT>", **named)


@made_once
def deepseek_vl(folder: Path, *, layout: str = "saved", seed: int = 0) -> Path:
    tokenizer = tokenizer_with("<image_placeholder>")
    config = DeepseekVLConfig(
        text_config={**TEXT, "vocab_size": tokenizer.get_vocab_size() + 3},
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        image_token_id=tokenizer.token_to_id("<image_placeholder>"),
        tie_word_embeddings=False,
    )
    images = {"image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 56, "width": 56}, "min_size": 14}
    processor = {"processor_class": "DeepseekVLProcessor", "image_processor": images, "num_image_tokens": 16}
    return save(folder, config, tokenizer, processor, "<image_placeholder>", image="<image_placeholder>")


@made_once
def aya_vision(folder: Path, *, window: int = 4096) -> Path:
    """One of its layers sees a window: it is served as far as that reaches."""
    marks = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<image>", "TILE", "TILE_GLOBAL")
    tokenizer = tokenizer_with(*marks)
    layers = {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
    config = AyaVisionConfig(
        text_config={**text_shape(tokenizer), "model_type": "cohere2", "pad_token_id": 0, **layers},
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        downsample_factor=2,
        adapter_layer_norm_eps=1e-6,
        image_token_index=tokenizer.token_to_id("<|IMG_PATCH|>"),
    )
    images = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}, "max_patches": 4}
    processor = {"processor_class": "AyaVisionProcessor", "image_processor": images, "img_size": 56}
    return save(folder, config, tokenizer, {**processor, "patch_size": 14, "downsample_factor": 2}, "<image>")


@made_once
def gemma3(folder: Path, *, layers: Sequence[str] = ("full_attention", "full_attention"), window: int = 4096) -> Path:
    """Its pictures are read in both directions and most of its layers see a window: it must be refused."""
    tokenizer = tokenizer_with("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    text = {**TEXT, "model_type": "gemma3_text", "vocab_size": tokenizer.get_vocab_size() + 3, "head_dim": 16}
    config = Gemma3Config(
        text_config={**text, "sliding_window": window, "layer_types": list(layers)},
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=tokenizer.token_to_id("<image_soft_token>"),
        boi_token_index=tokenizer.token_to_id("<start_of_image>"),
        eoi_token_index=tokenizer.token_to_id("<end_of_image>"),
    )
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}
    processor = {"processor_class": "Gemma3Processor", "image_processor": images, "image_seq_length": 4}
    named = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    return save(folder, config, tokenizer, processor, "<start_of_image>", **named)


def reference(placeholder: str) -> Callable[[Path], Reference]:
    def load(folder: Path) -> Reference:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        processor = load_processor(folder, model.config.model_type)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

        def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
            text, how = [placeholder * len(images)], {"add_special_tokens": False}
            made = processor(text=text, images=images, return_tensors="pt", **how)
            alone = [processor(text=[placeholder], images=[p], **how) for p in images]
            return {"pixel_values": made["pixel_values"]}, [tokenizer.decode(one["input_ids"][0]) for one in alone]

        return Reference(model, tokenizer, placeholder, read)

    return load
