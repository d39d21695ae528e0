"""A small Llama 3.2 Vision folder and Transformers' way of reading pictures for it. Tiles of 56x56 pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, image_settings, load
from tests.helpers.families.made_once import made_once

TILE, TILES = 56, 4
IMAGE = "<|image|>"
SPECIALS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
IMAGE_PROCESSOR = {
    "image_processor_type": "MllamaImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": checkpoints.CLIP_MEAN,
    "image_std": checkpoints.CLIP_STD,
    "max_image_tiles": TILES,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": TILE, "width": TILE},
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "cross_attention_layers": [1, 3],
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rms_norm_eps": 1e-5,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 4,
    "image_size": TILE,
    "patch_size": 14,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 48 * 3,
    "max_num_tiles": TILES,
}


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with Llama 3's control tokens; the picture's own lies behind the vocabulary. No BOS is added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(checkpoints.CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (*SPECIALS, IMAGE)])
    return tokenizer


@made_once
def build(
    folder: Path,
    *,
    layout: str = "saved",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Grouped heads, gates that are open, scaled frequencies, two layers that look at pictures."""
    tokenizer = make_tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in (*SPECIALS, IMAGE)}
    named = {"vocab_size": ids[IMAGE], "bos_token_id": ids[SPECIALS[0]], "eos_token_id": ids["<|eot_id|>"]}
    config = MllamaConfig(
        text_config={**TEXT, **named, "pad_token_id": ids[SPECIALS[-1]], **(text or {})},
        vision_config={**VISION, **(vision or {})},
        image_token_index=ids[IMAGE],
        tie_word_embeddings=False,
    )
    model = MllamaForConditionalGeneration(config).float().eval()
    checkpoints.randomise(model, seed)
    _open_gates(model, seed)
    model.save_pretrained(folder)
    if layout == "published":
        _publish(folder)
        checkpoints._write(folder / "preprocessor_config.json", IMAGE_PROCESSOR)
    else:
        settings = {"image_processor": IMAGE_PROCESSOR, "processor_class": "MllamaProcessor"}
        checkpoints._write(folder / "processor_config.json", settings)
    checkpoints._write_tokenizer(
        folder, tokenizer, TEMPLATE, layout, bos=SPECIALS[0], eos="<|eot_id|>", pad=SPECIALS[-1]
    )
    return folder


def _open_gates(model: torch.nn.Module, seed: int) -> None:
    """Gates begin closed, and a closed gate would hide every mistake behind it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.shape == (1,):
                width = 0.15 if "cross_attn" in name else 0.6  # wide open, a picture would drown the text
                parameter.copy_(width * (1 + 0.5 * torch.rand(1, generator=generator)))


def _publish(folder: Path) -> None:
    """Names and settings as on the hub."""
    tensors = {published_name(name): tensor for name, tensor in checkpoints._tensors(folder)}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": text.pop("dtype", "float32")}
    config["torch_dtype"] = config.pop("dtype", "float32")
    checkpoints._write(folder / "config.json", config)


def published_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    is_old = name.startswith(("language_model.model.", "language_model.lm_head"))
    return name if is_old else name.replace("language_model.", "language_model.model.", 1)


# --- Transformers -------------------------------------------------------------------------------------------------


def reference(folder: Path, *, sees_ahead: bool = False) -> Reference:
    """`sees_ahead`: Transformers as it is, where text before the first picture attends to all of it. Meta's code, which
    the weights were trained with, lets that text pass the layers untouched: so does this reference by default."""
    model, tokenizer = load(MllamaForConditionalGeneration, folder)
    processor = MllamaImageProcessorPil(**image_settings(folder))
    tiles: list[int] = []

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        made = dict(processor([images], return_tensors="pt"))
        tiles[:] = made.pop("num_tiles")[0]
        return made, [IMAGE] * len(images)

    def mask(ids: torch.Tensor) -> dict[str, Any]:
        listed = ids[0].tolist()
        seen = get_cross_attention_token_mask(listed, model.config.image_token_index)
        if not seen:
            return {}
        dense = convert_sparse_cross_attention_mask_to_dense([seen], [tiles], TILES, len(listed))
        return {"cross_attention_mask": torch.from_numpy(dense)}

    if not sees_ahead:
        for index in model.config.text_config.cross_attention_layers:
            layer = model.model.language_model.layers[index]
            layer.forward = passing(layer.forward)
    return Reference(model, tokenizer, IMAGE, read, mask)


def passing(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A layer that leaves rows alone which see no picture."""

    def masked(hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        is_seeing = given["full_text_row_masked_out_mask"][:, 0] > 0  # [1, T, 1]
        return torch.where(is_seeing, forward(hidden, **given), hidden)

    return masked


HUB: dict[str, Any] = {
    "model_type": "mllama",
    "image_token_index": 128256,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "mllama_text_model",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "attention_heads": 16,
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "image_size": 560,
        "intermediate_layers_indices": [3, 7, 15, 23, 30],
        "intermediate_size": 5120,
        "max_num_tiles": 4,
        "model_type": "mllama_vision_model",
        "norm_eps": 1e-05,
        "num_channels": 3,
        "num_global_layers": 8,
        "num_hidden_layers": 32,
        "patch_size": 14,
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        "vision_output_dim": 7680,
    },
}
