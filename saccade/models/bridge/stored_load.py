"""Loads weights of Transformers' layers that stay quantised, which have never been anything else.

To Transformers' own loading such a weight is a label: a matrix without memory, whose rows say which of the
checkpoint's tensors it is. So its renaming and stacking show where each belongs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.models.bridge.model import decoder_of
from saccade.models.bridge.published import on_host
from saccade.models.bridge.stored import Stored, candidates, keep, shape_of, unify_experts
from saccade.models.fp8_weights import Fp8Weights, has_blocks, quantized
from saccade.models.int4_weights import CHUNK, GroupScales, Int4Weights, fill_packed
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.weights import copy_quantized

Quantized = Fp8Weights | Int4Weights
_MARK = -1  # begins a label
_BASE = 128  # of its number: 16 bits hold its digits
_DIGITS = 4
_META = torch.device("meta")
_LAYERS = "decoder.layers."  # ours, whose weights may all be quantised


class _Place(NamedTuple):
    module: nn.Module
    name: str
    sources: Mapping[str, int]  # the checkpoint's tensors, and rows of each


def load_stored(
    load: Callable[[Mapping[str, Tensor]], Any],
    tensors: DequantizedTensors,
    kinds: Quantized | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A model by `load`, with all weights on the device that `kinds` keeps; others are dequantised."""
    names = [] if kinds is None else [name for name in tensors.file_of if kinds.has(name)]
    shapes = {name: shape for name in names if (shape := tensors.shape(name))[-1] % CHUNK == 0}
    while True:
        labels = {name: _label(number, shape, dtype) for number, (name, shape) in enumerate(shapes.items())}
        others = tensors.file_of.keys() - shapes.keys()
        model = load(labels | {name: on_host(tensors, name, dtype) for name in others})
        places = list(_places(model, kinds, shapes))
        lost = shapes.keys() - {source for place in places for source in place.sources}
        if not lost:  # else those are not of its layers, or cannot stay so
            break
        shapes = {name: shape for name, shape in shapes.items() if name not in lost}
    for place in places:
        stored = _empty(kinds, place.sources, shape_of(place.module, place.name), dtype, device)
        assert stored is not None, place.name
        parts = [stored] if len(place.sources) == 1 else stored.rows(list(place.sources.values()))
        for source, part in zip(place.sources, parts, strict=True):
            copy_quantized(tensors, source, part.weight, part.scales)
        keep(place.module, place.name, stored)
    unify_experts(_layers(model))
    return model


@torch.no_grad()
def quantize_layers(model: Any, kinds: Quantized, dtype: torch.dtype, device: torch.device) -> None:
    """All weights of its layers, one at a time. Those in INT4 are made at random."""
    generator = torch.Generator(device).manual_seed(0)
    for module, name, path in candidates(_layers(model)):
        values = getattr(module, name).data
        *stack, rows, _ = values.shape
        sizes = [rows] * (stack[0] if stack else 1)
        stored = _empty(kinds, {_LAYERS + path: sum(sizes)}, tuple(values.shape), dtype, device)
        if stored is None:
            continue
        for part, of_part in zip(stored.rows(sizes), values.flatten(0, -2).split(sizes), strict=True):
            if isinstance(part.scales, GroupScales):
                fill_packed(part.weight, part.scales, generator)
                continue
            values_of_part = quantized(of_part.to(device), has_blocks(part.weight, part.scales))
            for ours, value in zip((part.weight, part.scales), values_of_part, strict=True):
                ours.copy_(value)
        keep(module, name, stored)
    unify_experts(_layers(model))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # weights as they were made: the memory of CUDA graphs is apart from others'


def _layers(model: Any) -> nn.Module:
    return getattr(decoder_of(model), "layers", None) or nn.ModuleList()


def _empty(
    kinds: Quantized | None,
    parts: Mapping[str, int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Stored | None:
    pair = None if kinds is None else kinds.empty(parts, shape, device)
    if pair is None:
        return None
    weight, scales = pair
    return Stored(weight, scales, dtype)


def _label(number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    row = torch.zeros(shape[-1], dtype=dtype)
    digits = [number // _BASE**place % _BASE for place in range(_DIGITS)]
    row[: _DIGITS + 1] = torch.tensor([_MARK, *digits], dtype=dtype)
    return row.expand(*shape)


def _places(model: Any, kinds: Quantized | None, shapes: Mapping[str, Sequence[int]]) -> Iterator[_Place]:
    names = list(shapes)
    for module, name, _ in candidates(_layers(model)):
        weight = getattr(module, name)
        sources = _sources(weight, names)
        is_whole = all(rows == math.prod(shapes[source][:-1]) for source, rows in sources.items())
        fits = sources and is_whole and _empty(kinds, sources, tuple(weight.shape), weight.dtype, _META)
        if fits:
            yield _Place(module, name, sources)


def _sources(weight: Tensor, names: Sequence[str]) -> dict[str, int]:
    """Tensors whose labels these rows are, and how many; nothing: they are numbers, or were moved."""
    rows = weight.flatten(0, -2)[:, : _DIGITS + 1].long()
    is_copied = weight.dim() == 2 and weight.stride(0) != 0  # its rows may be in another order
    if is_copied or rows.shape[1] <= _DIGITS or bool((rows[:, 0] != _MARK).any()):
        return {}
    numbers = (rows[:, 1:] * _BASE ** torch.arange(_DIGITS)).sum(1)
    found, counts = torch.unique_consecutive(numbers, return_counts=True)
    if len(found.unique()) < len(found) or int(found.max()) >= len(names):
        return {}
    return {names[number]: count for number, count in zip(found.tolist(), counts.tolist(), strict=True)}
