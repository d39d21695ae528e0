"""Weights of a published layout by the names of Transformers' class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint.layout import Layout
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.tensor_files import StoredTensors

_LORA = re.compile(r"\.lora_[AB]\.")


def weights_of(tensors: StoredTensors, layout: Layout, raw: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """All that the checkpoint has, dequantised. `raw`: its config.json."""
    weights: dict[str, Tensor] = {}
    for name in tensors.file_of:
        if not _LORA.search(name):
            weight = _with_adapter(tensors, name, layout, raw, dtype)
            weights |= _parts(_renamed(name, layout), weight, layout, raw)
    return weights


def _renamed(name: str, layout: Layout) -> str:
    for pattern, replacement in layout.renames:
        name = re.sub(pattern, replacement, name)
    return name


def _parts(name: str, weight: Tensor, layout: Layout, raw: Any) -> Iterator[tuple[str, Tensor]]:
    split = next((split for split in layout.splits if f".{split.part}." in name), None)
    if split is None:
        yield name, weight
        return
    rows = _groups(weight, raw) if split.in_groups else weight.chunk(len(split.becomes))
    for part, cut in zip(split.becomes, rows, strict=True):
        yield name.replace(split.part, part), cut.contiguous()


def _groups(weight: Tensor, raw: Any) -> Sequence[Tensor]:
    """Queries, keys and values of all groups of heads."""
    text = raw["llm_config"]
    groups = int(text["num_key_value_heads"])
    queries = int(text["num_attention_heads"]) // groups
    heads = weight.view(groups, queries + 2, -1, *weight.shape[1:])
    return [part.flatten(0, 2) for part in torch.split(heads, [queries, 1, 1], dim=1)]


def on_host(tensors: StoredTensors, name: str, dtype: torch.dtype) -> Tensor:
    """What is stored in float32 stays so: Transformers knows what its class computes with in float32."""
    weight = tensors.read(name)
    is_stored_so = not isinstance(tensors, DequantizedTensors) or tensors.is_plain(name)
    return weight.to("cpu", torch.promote_types(weight.dtype, dtype) if is_stored_so else dtype)


def _with_adapter(tensors: StoredTensors, name: str, layout: Layout, raw: Any, dtype: torch.dtype) -> Tensor:
    """With the LoRA that the layout names, which is stored beside its base."""
    weight = on_host(tensors, name, dtype)
    if layout.adapter is None or ".base_layer." not in name:
        return weight
    kind = layout.adapter.removesuffix("_lora")
    first, second = (tensors.read(name.replace("base_layer", f"lora_{side}.{kind}")).float() for side in "AB")
    settings = raw[layout.adapter]
    added: Tensor = weight.float() + second @ first * (settings["lora_alpha"] / settings["r"])
    return added.to(dtype)
