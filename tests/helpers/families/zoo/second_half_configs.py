"""Three families whose config is written out, as one token means something in several places of it."""

from __future__ import annotations

from pathlib import Path

from transformers import LlavaNextVideoConfig, Ovis2Config, VideoLlavaConfig

from tests.helpers.families.family_fallback import VISION, save, text_shape, tokenizer_with

CLIP = {**VISION, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
SQUARE = {"size": {"height": 56, "width": 56}}
CROPPED = {"size": {"shortest_edge": 56}, "crop_size": SQUARE["size"]}


def ovis2(folder: Path) -> Path:
    """Its code puts embeddings of its own into the tokens around a picture, too."""
    around = [f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")]
    tokenizer = tokenizer_with("<image>", "<IMG_ATOM>", *around)
    tower = {"image_size": 56, "patch_size": 14, "vocab_size": 32, "num_visual_indicator_tokens": 5, "hidden_stride": 2}
    config = Ovis2Config(
        text_config={**text_shape(tokenizer), "model_type": "qwen2"},
        vision_config={**VISION, **tower, "tokenize_function": "softmax"},
        image_token_id=tokenizer.token_to_id("<IMG_ATOM>"),
        visual_indicator_token_ids=[tokenizer.token_to_id(name) for name in around],
        hidden_size=64,
        vocab_size=tokenizer.get_vocab_size() + 3,
    )
    images = {"image_processor_type": "Ovis2ImageProcessor", **SQUARE, "crop_to_patches": True}
    processor = {"processor_class": "Ovis2Processor", "image_processor": images, "image_seq_length": 4}
    return save(folder, config, tokenizer, processor, "<image>")


def video_llava(folder: Path) -> Path:
    tokenizer = tokenizer_with("<image>", "<video>")
    ids = {f"{kind}_token_index": tokenizer.token_to_id(f"<{kind}>") for kind in ("image", "video")}
    config = VideoLlavaConfig(text_config=text_shape(tokenizer), vision_config=CLIP, image_seq_length=16, **ids)
    images = {"image_processor_type": "VideoLlavaImageProcessor", **CROPPED}
    processor = {"processor_class": "VideoLlavaProcessor", "image_processor": images, "patch_size": 14}
    how = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return save(folder, config, tokenizer, {**processor, **how}, "<image>")


def llava_next_video(folder: Path) -> Path:
    tokenizer, shapes = tokenizer_with("<image>", "<video>"), [[56, 112], [112, 56], [112, 112]]
    ids = {f"{kind}_token_index": tokenizer.token_to_id(f"<{kind}>") for kind in ("image", "video")}
    config = LlavaNextVideoConfig(
        text_config=text_shape(tokenizer), vision_config=CLIP, image_grid_pinpoints=shapes, **ids
    )
    images = {"image_processor_type": "LlavaNextImageProcessor", **CROPPED, "image_grid_pinpoints": shapes}
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    named = {"image_token": "<image>", "video_token": "<video>", "processor_class": "LlavaNextVideoProcessor"}
    return save(folder, config, tokenizer, {**named, **how, "image_processor": images}, "<image>")
