"""Checkpoint folders without weights: the shapes of published models, and a tokenizer made on the spot.

Nothing is downloaded: engines fill such a folder with random weights. The tokenizer knows the words of the prompts
below as single tokens and pads its vocabulary to the model's size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

LONGEST = 524288  # positions: 64 images of 2560x1440 are 300,000 tokens
QUESTION = "Question {} about this picture?"
ANSWER = "It is a picture."
WORDS = (
    "Describe this. Compare. What? Describe. warm " * 4,
    " ".join(QUESTION.format(i) for i in range(10)) + " user assistant USER: ASSISTANT: " + ANSWER * 4,
)
QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
QWEN_IDS = {"bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
            "vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656}  # fmt: skip
QWEN_ROPE = {"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
CLIP_COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384,
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP_COLOURS,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model to measure: what its folder holds and how its prompts are written."""

    name: str
    config: dict[str, Any]
    images: dict[str, Any]  # preprocessor_config.json
    specials: tuple[str, ...]
    first_special: int  # id; ordinary tokens lie below
    image: str  # how an image stands in a prompt
    turn_end: str = "<|im_end|>\n<|im_start|>assistant\n"
    answer_end: str = "<|im_end|>\n"
    eos: str = "<|im_end|>"


def _qwen(name: str, model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> Shape:
    kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[model_type]
    vision = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3, **vision}
    config = {
        "architectures": [f"{kind}ForConditionalGeneration"], "model_type": model_type, "torch_dtype": "bfloat16",
        "hidden_act": "silu", "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-6, "use_sliding_window": False,
        **QWEN_IDS, **QWEN_ROPE, **text, "vision_config": vision,
    }  # fmt: skip
    pad = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    return Shape(name, config, QWEN_IMAGES, QWEN_TOKENS, QWEN_IDS["bos_token_id"], pad)


def _llava() -> Shape:
    text = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "rms_norm_eps": 1e-5,
            "max_position_embeddings": LONGEST, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip
    vision = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336,
              "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "projection_dim": 768}  # fmt: skip
    config = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "torch_dtype": "bfloat16",
        "image_token_index": 32000, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default", "tie_word_embeddings": False, "text_config": text,
        "vision_config": vision,
    }  # fmt: skip
    images = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}, "do_center_crop": True,
        "crop_size": {"height": 336, "width": 336}, "do_resize": True, "do_normalize": True, "do_rescale": True,
        "do_convert_rgb": True, "resample": 3, "rescale_factor": 1 / 255, **CLIP_COLOURS,
    }  # fmt: skip
    specials = ("<image>", "<pad>", "</s>")
    return Shape("llava_1_5_7b", config, images, specials, 32000, "USER: <image>\n", " ASSISTANT: ", "</s>", "</s>")


_QWEN2_VISION = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_act": "quick_gelu"}
_QWEN2_TEXT = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
               "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
_QWEN2_5_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "hidden_act": "silu",
                   "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                   "spatial_patch_size": 14, "tokens_per_second": 2}  # fmt: skip
_QWEN2_5_TEXT = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                 "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
_FOUR_TEXT = {**_QWEN2_TEXT, "num_hidden_layers": 4}
_FOUR_VISION = {**_QWEN2_VISION, "depth": 4, "hidden_size": 1536}
_TINY_TEXT = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
_TINY_VISION = {**_QWEN2_VISION, "depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 256}

SHAPES = {
    shape.name: shape
    for shape in (
        _qwen("qwen2_vl_2b", "qwen2_vl", _QWEN2_TEXT, {**_QWEN2_VISION, "hidden_size": 1536}),
        _qwen("qwen2_5_vl_7b", "qwen2_5_vl", _QWEN2_5_TEXT, _QWEN2_5_VISION),
        _llava(),
        _qwen("four_layers", "qwen2_vl", _FOUR_TEXT, _FOUR_VISION),  # real widths, for comparing numbers
        _qwen("tiny", "qwen2_vl", _TINY_TEXT, _TINY_VISION),  # to try the script on, also without a GPU
    )
}


def write_folder(shape: Shape, folder: Path) -> Path:
    """All that an engine reads of a checkpoint but weights."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": shape.config,
        "preprocessor_config.json": shape.images,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": shape.eos},
        "processor_config.json": _processor(shape),
    }
    for name, value in files.items():
        if value:
            (folder / name).write_text(json.dumps(value, indent=1))
    _tokenizer(shape).save(str(folder / "tokenizer.json"))
    return folder


def _processor(shape: Shape) -> dict[str, Any]:
    if shape.config["model_type"] != "llava":
        return {}
    return {"processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 14,
            "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}  # fmt: skip


def _tokenizer(shape: Shape) -> Tokenizer:
    """Byte-level BPE over the words of the prompts; the rest of the vocabulary is names that no text has."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(WORDS, trainer)
    spec = json.loads(trained.to_str())["model"]
    vocabulary = dict(spec["vocab"])
    for token in range(len(vocabulary), shape.first_special):
        vocabulary[f"\u0120word{token}"] = token
    merges = [tuple(pair) for pair in spec["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in shape.specials])
    return tokenizer
