"""Makers of small checkpoints: a family is a few fields of its config, its tokenizer and its processor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.checkpoints import _write, _write_tokenizer, randomise
from tests.helpers.families.family_fallback import TEMPLATE, tokenizer_with
from tests.helpers.families.zoo.entry import Entry

Fields = Mapping[str, Any]
NOTHING: Mapping[str, Any] = MappingProxyType({})

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SQUARE_TOWER = {**TOWER, "image_size": 56, "patch_size": 14}
SQUARE = {"size": {"height": 56, "width": 56}}
WINDOW: dict[str, Any] = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}


ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


class Recipe(NamedTuple):
    model_type: str
    text: Fields  # of text_config
    vision: Fields  # of vision_config
    marks: tuple[str, ...]  # tokens of the vocabulary beside those of every family
    ids: Mapping[str, str]  # the config's token ids, by the tokens that they are
    processor: Fields  # processor_config.json
    images: Fields  # its image processor
    image: str  # what a raw prompt says where an image goes
    more: Fields = NOTHING  # of the config itself
    names: Mapping[str, str] = NOTHING  # tokens that the tokenizer's config names
    gains: Mapping[str, float] = NOTHING  # factors of weights, by a part of their names
    seed: int = 0  # of the weights
    flat: bool = False  # the config has its decoder's fields itself, and the vocabulary


def recipe(name: str, base: Recipe | None = None, **fields: Any) -> Recipe:
    """As another, but for a few fields; what is a mapping in both is joined."""
    if base is None:
        return Recipe(model_type=name, **fields)
    joined = {key: {**getattr(base, key), **value} for key, value in fields.items() if isinstance(value, Mapping)}
    return base._replace(model_type=name, **{**fields, **joined})


def entry(made: Recipe) -> Entry:
    return Entry(partial(build, made), made.image)


def build(made: Recipe, folder: Path) -> Path:
    tokenizer = tokenizer_with(*made.marks)
    write_model(made, tokenizer, folder)
    _write(folder / "processor_config.json", {**made.processor, "image_processor": dict(made.images)})
    template = TEMPLATE.replace("IMAGE", made.image.replace("\n", "\\n"))
    _write_tokenizer(folder, tokenizer, template, "saved", eos="<|im_end|>", pad="<|endoftext|>", **made.names)
    return folder


def write_model(made: Recipe, tokenizer: Tokenizer, folder: Path) -> None:
    ids = {field: tokenizer.token_to_id(token) for field, token in made.ids.items()}
    config = AutoConfig.for_model(made.model_type, **parts(made, tokenizer), **ids, **made.more)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    spread(model, made.seed, made.gains)
    model.save_pretrained(folder)


def parts(made: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """A config's fields that are configs, where it has any."""
    text = {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 3, **made.text}  # published ones are padded too
    if made.flat:
        return {**text, "vocabulary_map": tokenizer.get_vocab()}
    return {"text_config": text, "vision_config": dict(made.vision)}


def spread(model: torch.nn.Module, seed: int, gains: Mapping[str, float]) -> None:
    """Weights as `randomise` makes them; those of experts, which lie in one tensor, as if each lay alone."""
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and parameter.dim() == 3:
                gain = 6.0 if "down_proj" in name else 1.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain / parameter.shape[-1] ** 0.5)
            for part, factor in gains.items():
                if part in name:
                    parameter.mul_(factor)
