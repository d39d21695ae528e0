"""A family's small checkpoint as data: its config with the names of tokens in place of their numbers, its processor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.checkpoints import _write, _write_tokenizer, randomise
from tests.helpers.families.family_fallback import TEMPLATE, TEXT, VISION, tokenizer_with
from tests.helpers.families.zoo.entry import Entry


class Id(str):
    """A token. In a config it becomes its number, and the tokenizer has it among its special ones."""


VOCABULARY = Id("")
"""In a config: how many tokens there are, and a few more, as published vocabularies are padded."""

NOTHING: Mapping[str, str] = MappingProxyType({})
EVEN: Mapping[str, float] = MappingProxyType({})
ENDS = {"eos_token_id": Id("<|im_end|>"), "pad_token_id": Id("<|endoftext|>"), "bos_token_id": Id("<|endoftext|>")}
LLAMA = {**TEXT, **ENDS, "vocab_size": VOCABULARY}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None, "head_dim": 16}
TOWER = {**VISION, "image_size": 56, "patch_size": 14}
CLIP = {**TOWER, "model_type": "clip_vision_model"}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model"}
SQUARE = {"size": {"height": 56, "width": 56}}
CROPPED = {"size": {"shortest_edge": 56}, "crop_size": SQUARE["size"]}
GRIDS = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}  # pixels
WINDOW = 32


def family(
    kind: str,
    fields: dict[str, Any],
    processor: dict[str, Any],
    image: str,
    *,
    marks: tuple[str, ...] = (),
    named: Mapping[str, str] = NOTHING,
    own_names: bool = False,
    gains: Mapping[str, float] = EVEN,
    **more: Any,
) -> Entry:
    """What a config of that kind says, its processor_config.json, and where an image goes in a prompt.

    `marks` are tokens that no config names, `named` those that the tokenizer's config has names for. With `own_names`
    weights are named as in Transformers' code, not as on the hub: it cannot read all that it writes. `gains` are
    factors of weights by parts of their names, where answers would hardly depend on the prompt. What is left are
    fields of Entry.
    """
    return Entry(partial(_build, kind, fields, processor, image, marks, named, own_names, gains), image, **more)


def _build(
    kind: str,
    fields: dict[str, Any],
    processor: dict[str, Any],
    image: str,
    marks: tuple[str, ...],
    named: Mapping[str, str],
    own_names: bool,
    gains: Mapping[str, float],
    folder: Path,
) -> Path:
    tokenizer = tokenizer_with(*dict.fromkeys([*_tokens(fields), *named.values(), *marks]))
    config = AutoConfig.for_model(kind, **_numbered(fields, tokenizer))
    model = _model(config).float().eval()
    spread(model, gains)
    model.save_pretrained(folder, save_original_format=not own_names)
    _write(folder / "processor_config.json", processor)
    template = TEMPLATE.replace("IMAGE", image.replace("\n", "\\n"))
    _write_tokenizer(folder, tokenizer, template, "saved", eos="<|im_end|>", pad="<|endoftext|>", **named)
    return folder


def _model(config: Any) -> Any:
    known = type(config) in AutoModelForImageTextToText._model_mapping
    return (AutoModelForImageTextToText if known else AutoModelForCausalLM).from_config(config)


def spread(model: torch.nn.Module, gains: Mapping[str, float] = EVEN) -> None:
    """Random weights as of all small checkpoints; experts in one tensor as if each had its own."""
    randomise(model, 0)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.dim() == 3 and "experts" in name:
                parameter.mul_(parameter.shape[-2] ** 0.5)
            for part, gain in gains.items():
                if part in name:
                    parameter.mul_(gain)
        for name, tensor in model.state_dict().items():
            if name not in parameters and tensor.is_floating_point() and not tensor.any():
                tensor.normal_(std=0.1, generator=generator)  # such as what routers add: zeros would hide its absence


def _tokens(fields: Any) -> list[str]:
    if isinstance(fields, Id):
        return [fields] if fields else []
    if isinstance(fields, dict):
        return [token for value in fields.values() for token in _tokens(value)]
    return [token for value in fields for token in _tokens(value)] if isinstance(fields, list) else []


def _numbered(fields: Any, tokenizer: Tokenizer) -> Any:
    if isinstance(fields, Id):
        return tokenizer.token_to_id(fields) if fields else tokenizer.get_vocab_size() + 3
    if isinstance(fields, dict):
        return {key: _numbered(value, tokenizer) for key, value in fields.items()}
    return [_numbered(value, tokenizer) for value in fields] if isinstance(fields, list) else fields
