"""Small MiniCPM-V folders as they are published, and the reference for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference
from tests.helpers.families.reference_minicpmv import SlowModel, pixels_of, spelled, views_of

PATCH, SCALE, SLICES, QUERIES = 14, 56, 9, 4
IMAGE = "(<image>./</image>)"
MARKS = [f"<{end}{name}>" for name in ("image", "ref", "box", "slice", "image_id") for end in ("", "/")]
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "image_size": 140,
    "intermediate_size": 88,
    "model_type": "siglip",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "patch_size": PATCH,
}
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
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
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}
OF_IMAGES: dict[str, Any] = {
    "batch_vision_input": True,
    "batch_3d_resampler": True,
    "drop_vision_last_layer": False,
    "image_size": SCALE,
    "patch_size": PATCH,
    "query_num": QUERIES,
    "slice_config": {"max_slice_nums": SLICES, "patch_size": PATCH, "model_type": "minicpmv"},
    "slice_mode": True,
}
PIXELS: dict[str, Any] = {
    "image_processor_type": "MiniCPMVImageProcessor",
    "processor_class": "MiniCPMVProcessor",
    "max_slice_nums": SLICES,
    "scale_resolution": SCALE,
    "patch_size": PATCH,
    "use_image_id": True,
    "image_feature_size": QUERIES,
    "im_start": "<image>",
    "im_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "unk": "<unk>",
    "im_id_start": "<image_id>",
    "im_id_end": "</image_id>",
    "slice_mode": True,
    "norm_mean": [0.5, 0.5, 0.5],
    "norm_std": [0.5, 0.5, 0.5],
    "version": 4.5,
}


def build(
    folder: Path,
    *,
    layout: str = "published",
    seed: int = 0,
    version: float = 4.5,
    text: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    tokenizer = checkpoints.qwen_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", *MARKS)])
    raw = {
        "version": version,
        "architectures": ["MiniCPMV"],
        "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"},
        **TEXT,
        **OF_IMAGES,
        "model_type": "minicpmv",
        "vision_config": VISION,
        "vocab_size": tokenizer.get_vocab_size() + 6,
        **(text or {}),
        **changes,
    }
    save_file(weights(raw, seed), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "unk_token": "<unk>"}
    kind = {"tokenizer_class": "MiniCPMVTokenizerFast", "add_bos_token": False, "chat_template": TEMPLATE}
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    for name, values in {
        "config": raw,
        "preprocessor_config": {**PIXELS, "version": version},
        "tokenizer_config": {**names, **kind},
        "generation_config": {"eos_token_id": ends},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "modeling_minicpmv.py").write_text("raise SystemExit('code of a checkpoint was run')")
    return folder


def weights(raw: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in {**_text_shapes(raw), **_tower_shapes(raw), **_resampler_shapes(raw)}.items():
        noise = torch.randn(shape, generator=generator)
        if ("embed" in name and "patch" not in name) or len(shape) == 1:
            is_norm = "norm" in name or ".ln_" in name
            made[name] = 1 + 0.1 * noise if is_norm and name.endswith("weight") else 0.2 * noise
        else:
            gain = 6.0 if "o_proj" in name or "down_proj" in name else 1.5
            made[name] = noise * gain / math.prod(shape[1:]) ** 0.5
    return made


def _both(sizes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Weights and biases."""
    return {f"{name}.weight": size for name, size in sizes.items()} | {
        f"{name}.bias": size[:1] for name, size in sizes.items()
    }


def _tower_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vision = raw["vision_config"]
    width, wide = vision["hidden_size"], vision["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = _both({"embeddings.patch_embedding": (width, 3, PATCH, PATCH)})
    shapes["embeddings.position_embedding.weight"] = ((vision["image_size"] // PATCH) ** 2, width)
    shapes |= _both({"post_layernorm": (width,)})
    for i in range(vision["num_hidden_layers"] - raw["drop_vision_last_layer"]):
        layer: dict[str, tuple[int, ...]] = {
            f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")
        }
        layer |= {"mlp.fc1": (wide, width), "mlp.fc2": (width, wide), "layer_norm1": (width,), "layer_norm2": (width,)}
        shapes |= _both({f"encoder.layers.{i}.{name}": size for name, size in layer.items()})
    return {f"vpm.{name}": shape for name, shape in shapes.items()}


def _resampler_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width = raw["hidden_size"], raw["vision_config"]["hidden_size"]
    shapes = _both({"attn.out_proj": (hidden, hidden), **{f"ln_{name}": (hidden,) for name in ("q", "kv", "post")}})
    shapes |= {"query": (raw["query_num"], hidden), "proj": (hidden, hidden), "kv_proj.weight": (hidden, width)}
    shapes |= {"attn.in_proj_weight": (3 * hidden, hidden), "attn.in_proj_bias": (3 * hidden,)}
    return {f"resampler.{name}": shape for name, shape in shapes.items()}


def _text_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, wide, head = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    many, few = raw["num_attention_heads"] * head, raw["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (raw["vocab_size"], hidden)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (raw["vocab_size"], hidden)}
    for i in range(raw["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in zip("qkv", (many, few, few), strict=True)
        }
        if raw["version"] == 2.6:
            layer |= {f"{name.removesuffix('weight')}bias": size[:1] for name, size in layer.items()}
        if raw["version"] == 4.5:
            layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
        layer |= {"self_attn.o_proj.weight": (hidden, many), "mlp.gate_proj.weight": (wide, hidden)}
        layer |= {"mlp.up_proj.weight": (wide, hidden), "mlp.down_proj.weight": (hidden, wide)}
        layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    return {f"llm.{name}": shape for name, shape in shapes.items()}


def reference(folder: Path) -> Reference:
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        views = [[pixels_of(view) for view in views_of(image, SLICES, SCALE, PATCH)] for image in images]
        texts = [spelled(image.size, i, SLICES, SCALE, QUERIES) for i, image in enumerate(images)]
        return {"views": views}, texts

    return Reference(SlowModel(folder, words.convert_tokens_to_ids("<unk>")), words, IMAGE, read)
