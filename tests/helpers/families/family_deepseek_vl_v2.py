"""Small DeepSeek-VL2 folders, and the reference for them.

Tiles of 44x44 pixels, of which 3x3 patches of 14 are seen: the last pixels make no patch, the last patches no whole
token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference
from tests.helpers.families.made_once import made_once
from tests.helpers.families.reference_deepseek_vl_v2 import (
    SlowModel,
    canvas_of,
    has_experts,
    pixels_of,
    tokens_of,
    views_of,
)

TILE, PATCH, MERGE = 44, 14, 2
CANVASES = [[44, 44], [44, 88], [88, 44], [44, 132], [132, 44], [88, 88]]  # width, height
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIALS = [BOS, EOS, "<｜▁pad▁｜>", "<image>", "<|User|>", "<|Assistant|>", "<|ref|>", "<|/ref|>"]
IMAGE = "<image>\n"
LANGUAGE: Mapping[str, Mapping[str, Any]] = {
    "tiny": {  # plain heads
        "use_mla": False,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "small": {  # latent attention, queries straight from the input
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "base": {  # sigmoid scores with a correction, weights that add up to the scale
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
    },
    "grouped": {  # groups of experts, queries from a short vector, stretched positions, not every layer has experts
        "kv_lora_rank": 32,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "moe_layer_freq": 2,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    },
}
MULTIPLES = [(m, n) for m in range(1, 10) for n in range(1, 10) if m * n <= 9]
PUBLISHED = [[384 * m, 384 * n] for m, n in sorted(MULTIPLES, key=lambda mn: (mn[0] * mn[1], mn))]
TINY_LANGUAGE = {
    "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_size": 1280, "intermediate_size": 6848,
    "kv_lora_rank": None, "max_position_embeddings": 4096, "model_type": "deepseek_v2", "moe_intermediate_size": 896,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 10, "num_experts_per_tok": 6,
    "num_hidden_layers": 12, "num_key_value_heads": 10, "q_lora_rank": None, "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "use_mla": False,
    "v_head_dim": 0, "vocab_size": 129280,
}  # fmt: skip
TINY: dict[str, Any] = {  # config.json of the smallest published checkpoint
    "architectures": ["DeepseekVLV2ForCausalLM"],
    "candidate_resolutions": PUBLISHED,
    "global_view_pos": "head",
    "language_config": TINY_LANGUAGE,
    "model_type": "deepseek_vl_v2",
    "projector_config": {"model_type": "mlp_projector", "n_embed": 1280},
    "tile_tag": "2D",
    "torch_dtype": "bfloat16",
    "vision_config": {
        "layers": 27, "mlp_ratio": 3.7362, "model_name": "siglip_so400m_patch14_384", "model_type": "vision",
        "patch_size": 14, "width": 1152,
    },
}  # fmt: skip
PROCESSOR: dict[str, Any] = {  # processor_config.json as it is published
    "add_special_token": False,
    "candidate_resolutions": CANVASES,
    "downsample_ratio": MERGE,
    "ignore_id": -100,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_token": "<image>",
    "mask_prompt": False,
    "normalize": True,
    "pad_token": "<｜▁pad▁｜>",
    "patch_size": PATCH,
    "processor_class": "DeepseekVLV2Processor",
    "sft_format": "deepseek",
}


# --- a folder -----------------------------------------------------------------------------------------------------


def tokenizer() -> Tokenizer:
    made = checkpoints.qwen_tokenizer()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    return made


def config(made: Tokenizer, size: str, **language: Any) -> dict[str, Any]:
    text = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "bos_token_id": made.token_to_id(BOS),
        "eos_token_id": made.token_to_id(EOS),
        "first_k_dense_replace": 1,
        "hidden_size": 64,
        "intermediate_size": 112,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "torch_dtype": "float32",
        "vocab_size": made.get_vocab_size() + 6,
        **LANGUAGE[size],
        **language,
    }
    return {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "candidate_resolutions": CANVASES,
        "global_view_pos": "head",
        "language_config": text,
        "model_type": "deepseek_vl_v2",
        "projector_config": {"model_type": "mlp_projector", "n_embed": 64, "input_dim": 48},
        "tile_tag": "2D",
        "torch_dtype": "float32",
        "vision_config": {
            "layers": 2,
            "mlp_ratio": 2.7362,
            "model_name": "siglip_so400m_patch14_384",
            "model_type": "vision",
            "patch_size": PATCH,
            "width": 48,
            "heads": 4,
            "image_size": TILE,
        },
    }


@made_once
def build(folder: Path, *, layout: str = "published", seed: int = 0, size: str = "small", **language: Any) -> Path:
    """As on the hub, which is the only layout there is: no chat template, no preprocessor_config.json."""
    made = tokenizer()
    raw = config(made, size, **language)
    save_file(_weights(raw, seed), folder / "model.safetensors", metadata={"format": "pt"})
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": "<｜▁pad▁｜>", "tokenizer_class": "LlamaTokenizerFast"}
    for name, values in {"config": raw, "processor_config": PROCESSOR, "tokenizer_config": names}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def _weights(raw: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in _shapes(raw).items():
        noise = torch.randn(shape, generator=generator)
        if "embed_tokens" in name or len(shape) == 1:
            is_norm = "norm" in name and name.endswith("weight")
            made[name] = 1 + 0.1 * noise if is_norm else 0.2 * noise
        else:
            gain = 6.0 if "o_proj" in name or "down_proj" in name else 1.5
            made[name] = noise * gain / math.prod(shape[1:]) ** 0.5
    return made


def _shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    text, vision, hidden = raw["language_config"], raw["vision_config"], raw["language_config"]["hidden_size"]
    width, wide, side = vision["width"], int(vision["width"] * vision["mlp_ratio"]), TILE // PATCH
    shapes: dict[str, tuple[int, ...]] = {
        "image_newline": (hidden,),
        "view_seperator": (hidden,),
        "vision.patch_embed.proj.weight": (width, 3, PATCH, PATCH),
        "vision.patch_embed.proj.bias": (width,),
        "vision.pos_embed": (1, side**2, width),
        "vision.attn_pool.latent": (1, 1, width),  # of the pooling head, which nobody uses
        "language.model.embed_tokens.weight": (text["vocab_size"], hidden),
        "language.model.norm.weight": (hidden,),
        "language.lm_head.weight": (text["vocab_size"], hidden),
    }
    linear = {
        "vision.attn_pool.q": (width, width),
        "vision.attn_pool.kv": (2 * width, width),
        "vision.attn_pool.proj": (width, width),
        "vision.attn_pool.mlp.fc1": (wide, width),
        "vision.attn_pool.mlp.fc2": (width, wide),
        "projector.layers.0": (hidden, width * MERGE**2),
        "projector.layers.2": (hidden, hidden),
    }
    norms = ["vision.norm", "vision.attn_pool.norm"]
    for i in range(vision["layers"]):
        block = f"vision.blocks.{i}"
        linear |= {
            f"{block}.attn.qkv": (3 * width, width),
            f"{block}.attn.proj": (width, width),
            f"{block}.mlp.fc1": (wide, width),
            f"{block}.mlp.fc2": (width, wide),
        }
        norms += [f"{block}.norm1", f"{block}.norm2"]
    for name, (outputs, inputs) in linear.items():
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for i in range(text["num_hidden_layers"]):
        shapes |= {f"language.model.layers.{i}.{name}": shape for name, shape in _layer_shapes(text, i).items()}
    return shapes


def _layer_shapes(text: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if not text.get("use_mla", True):
        shapes |= {f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    else:
        rank, rope, nope, value = (
            text[n] for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        queries, short = heads * (nope + rope), text["q_lora_rank"]
        shapes |= {
            "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            "self_attn.kv_a_layernorm.weight": (rank,),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
            "self_attn.o_proj.weight": (hidden, heads * value),
        }
        if short is None:
            shapes["self_attn.q_proj.weight"] = (queries, hidden)
        else:
            shapes |= {
                "self_attn.q_a_proj.weight": (short, hidden),
                "self_attn.q_a_layernorm.weight": (short,),
                "self_attn.q_b_proj.weight": (queries, short),
            }
    if not has_experts(text, index):
        return shapes | _mlp_shapes("mlp", hidden, text["intermediate_size"])
    width = text["moe_intermediate_size"]
    shapes["mlp.gate.weight"] = (text["n_routed_experts"], hidden)
    if text["topk_method"] == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = (text["n_routed_experts"],)
    for expert in range(text["n_routed_experts"]):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, width)
    return shapes | _mlp_shapes("mlp.shared_experts", hidden, width * text["n_shared_experts"])


def _mlp_shapes(name: str, hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (wide, hidden),
        f"{name}.up_proj.weight": (wide, hidden),
        f"{name}.down_proj.weight": (hidden, wide),
    }


def reference(folder: Path) -> Reference:
    model = SlowModel(folder)
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        is_tiled = len(images) <= 2
        canvases = [canvas_of(p.size, CANVASES) if is_tiled else (TILE, TILE) for p in images]
        views = [
            torch.stack([pixels_of(v) for v in views_of(p, c, TILE)]) for p, c in zip(images, canvases, strict=True)
        ]
        spelled = ["<image>" * tokens_of(canvas, TILE, PATCH, MERGE) for canvas in canvases]
        return {"views": views, "canvases": canvases}, spelled

    return Reference(model, words, "<image>", read)
