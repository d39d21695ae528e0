"""Small dots.ocr folders as they are published, and the reference for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, image_settings
from tests.helpers.families.reference_dots_ocr import SlowModel

PATCH, MERGE = 14, 2
IMAGE = "<|img|><|imgpad|><|endofimg|>"
END = "<|endofassistant|>"
SPECIALS = ["<|imgpad|>", "<|img|>", "<|endofimg|>", "<|user|>", "<|endofuser|>", "<|assistant|>", END]
REMOTE = {"AutoModelForCausalLM": "modeling_dots_ocr.DotsOCRForCausalLM"}
TEMPLATE = (  # of texts; the published one for parts leaves the marks of the user out
    "{%- for m in messages %}{%- if m.role == 'system' %}{{- '<|system|>' + m.content + '<|endofsystem|>\n' }}"
    "{%- elif m.role == 'user' %}{% if m.content is string %}{{- '<|user|>' + m.content + '<|endofuser|>' }}"
    "{% else %} {% for part in m.content %}{% if part['type'] == 'image' %}<|img|><|imgpad|><|endofimg|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{%- endif %}"
    "{%- elif m.role == 'assistant' %}{{- '<|assistant|>' + m.content }}"
    "{%- if not loop.last %}{{- '<|endofassistant|>' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if messages[-1].role != 'assistant' %}{{- '<|assistant|>' }}{%- endif %}"
)
VISION: dict[str, Any] = {
    "embed_dim": 48,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_channels": 3,
    "patch_size": PATCH,
    "post_norm": True,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 1,
    "use_bias": False,
    "attn_implementation": "flash_attention_2",
    "init_merger_std": 0.02,
    "initializer_range": 0.02,
    "is_causal": False,
}
TEXT: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 112,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}
PIXELS: dict[str, Any] = {  # preprocessor_config.json as it is published
    "min_pixels": 3136,
    "max_pixels": 11289600,
    "patch_size": PATCH,
    "temporal_patch_size": 1,
    "merge_size": MERGE,
    "image_mean": checkpoints.CLIP_MEAN,
    "image_std": checkpoints.CLIP_STD,
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "DotsVLProcessor",
}


def build(
    folder: Path,
    *,
    layout: str = "published",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    tokenizer = checkpoints.qwen_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    raw = config(tokenizer, text or {}, vision or {})
    save_file(weights(raw, seed), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", END)]
    names = {"eos_token": "<|endoftext|>", "pad_token": "[PAD]", "tokenizer_class": "Qwen2Tokenizer"}
    for name, values in {
        "config": raw,
        "preprocessor_config": PIXELS,
        "tokenizer_config": names,
        "chat_template": {"chat_template": TEMPLATE},
        "generation_config": {"eos_token_id": ends},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "modeling_dots_ocr.py").write_text("raise SystemExit('code of a checkpoint was run')")
    return folder


def config(tokenizer: Tokenizer, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DotsOCRForCausalLM"],
        "model_type": "dots_ocr",
        "auto_map": REMOTE,
        **TEXT,
        "image_token_id": tokenizer.token_to_id("<|imgpad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vocab_size": tokenizer.get_vocab_size() + 6,
        **text,
        "vision_config": {**VISION, **vision},
    }


def weights(raw: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in {**_text_shapes(raw), **_tower_shapes(raw["vision_config"])}.items():
        noise = torch.randn(shape, generator=generator)
        if "embed_tokens" in name or len(shape) == 1:
            is_norm = "norm" in name or "ln_q" in name
            made[name] = 1 + 0.1 * noise if is_norm and name.endswith("weight") else 0.2 * noise
        else:
            gain = 6.0 if "o_proj" in name or "down_proj" in name else 1.5
            made[name] = noise * gain / math.prod(shape[1:]) ** 0.5
    return made


def _tower_shapes(vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, wide, merged = vision["embed_dim"], vision["intermediate_size"], vision["embed_dim"] * MERGE**2
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.patchifier.proj.weight": (width, 3, PATCH, PATCH),
        "patch_embed.patchifier.proj.bias": (width,),
        "patch_embed.patchifier.norm.weight": (width,),
        "merger.ln_q.weight": (width,),
        "merger.ln_q.bias": (width,),
        "merger.mlp.0.weight": (merged, merged),
        "merger.mlp.0.bias": (merged,),
        "merger.mlp.2.weight": (vision["hidden_size"], merged),
        "merger.mlp.2.bias": (vision["hidden_size"],),
    }
    if vision["post_norm"]:
        shapes["post_trunk_norm.weight"] = (width,)
    sizes = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    sizes |= {"mlp.fc1": (wide, width), "mlp.fc2": (width, wide), "mlp.fc3": (wide, width)}
    for i in range(vision["num_hidden_layers"]):
        shapes |= {f"blocks.{i}.{norm}.weight": (width,) for norm in ("norm1", "norm2")}
        shapes |= {f"blocks.{i}.{name}.weight": size for name, size in sizes.items()}
        if vision["use_bias"]:
            shapes |= {f"blocks.{i}.{name}.bias": size[:1] for name, size in sizes.items()}
    return {f"vision_tower.{name}": shape for name, shape in shapes.items()}


def _text_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, wide, head = raw["hidden_size"], raw["intermediate_size"], raw["hidden_size"] // raw["num_attention_heads"]
    few = raw["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (raw["vocab_size"], hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (raw["vocab_size"], hidden)}
    for i in range(raw["num_hidden_layers"]):
        layer = {f"self_attn.{name}_proj": (rows, hidden) for name, rows in zip("qkv", (hidden, few, few), strict=True)}
        layer |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden)}
        layer |= {"mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
        biases = {name: size[:1] for name, size in layer.items() if name[-6] in "qkv"}
        shapes |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
        shapes |= {f"model.layers.{i}.{name}.bias": size for name, size in biases.items()}
        shapes |= {f"model.layers.{i}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes


def reference(folder: Path) -> Reference:
    processor = Qwen2VLImageProcessorPil(**image_settings(folder))

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        made = dict(processor(images, return_tensors="pt"))
        return made, ["<|imgpad|>" * (int(grid.prod()) // MERGE**2) for grid in made["image_grid_thw"]]

    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return Reference(SlowModel(folder), words, "<|imgpad|>", read)
