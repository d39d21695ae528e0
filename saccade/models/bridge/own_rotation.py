"""How Transformers' layers rotate queries and keys, from what reaches our attention.

One embedding stands at many positions. Where attention adds nothing, tokens differ by their rotation alone:

    position            0    1    4    16   ...          of each axis alone, the others at 0
    pair of values      z    z e^if    z e^4if   ...     f: which of the module's frequencies, on which axis
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from saccade.models.bridge.errors import Unfit

if TYPE_CHECKING:
    from saccade.models.bridge.model import ModelBridge

_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}  # of a layer's largest value
_STEP = 4  # from one position to the next


class Rotation(NamedTuple):
    """`order` [d]: what stands at each place of a head of ours, whose halves are rotated as pairs."""

    order: Tensor
    frequencies: Tensor  # float32 [d / 2], zeros for what is not rotated
    axes: Tensor  # int64 [d / 2]
    gain: float = 1.0  # of queries and of keys

    @property
    def is_ordered(self) -> bool:
        return bool((self.order.diff() == 1).all())


class _Fit(NamedTuple):
    error: float
    frequencies: Tensor
    axes: Tensor


@torch.inference_mode()
def rotations_of(model: ModelBridge) -> dict[int, Rotation]:
    """Of each layer with attention. Those of one kind, with the same heads, are rotated alike."""
    positions = _positions(model)
    states = () if model.states is None else model.states.layers
    attends = [layer for layer in range(len(model.text.layers)) if layer not in states]
    heads = dict(zip(attends, _heads(model, positions), strict=True))
    kinds = getattr(model.text.config, "layer_types", None) or [None] * len(model.text.layers)
    groups: dict[object, list[int]] = {}
    for layer, values in heads.items():
        groups.setdefault((kinds[layer], values.shape), []).append(layer)
    rotations = {}
    for layers in groups.values():
        rotation = _rotation(model, torch.stack([heads[layer] for layer in layers]), positions)
        rotations.update(dict.fromkeys(layers, rotation))
    return {layer: rotations[layer] for layer in attends}


def _rotation(model: ModelBridge, heads: Tensor, positions: Tensor) -> Rotation:
    dim = heads.shape[-1]
    for table, gain in _tables(model):
        rotated = 2 * len(table)
        if rotated > dim or (rotated < dim and gain != 1):
            continue
        for pairs in (torch.arange(rotated).view(2, -1), torch.arange(rotated).view(-1, 2).T):
            fit = _fit(heads, pairs.to(model.device), table, positions)
            if fit.error <= _TOLERANCE[model.dtype]:
                return _padded(fit, pairs, dim, gain)
    raise Unfit("its queries and keys are not rotated as ours are, or not in all layers")


def _tables(model: ModelBridge) -> Iterator[tuple[Tensor, float]]:
    for module in model.text.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                yield buffer.float(), float(getattr(module, "attention_scaling", 1.0))


def _positions(model: ModelBridge) -> Tensor:
    """[axes, T]: zeros, then each axis by itself up to the end of the longest request."""
    far = [1]
    while far[-1] * _STEP < model.window:
        far.append(far[-1] * _STEP)
    far.append(model.window - 1)
    steps = torch.tensor(far, device=model.device)
    alone = torch.block_diag(*[steps[None]] * model.axes)  # type: ignore[no-untyped-call]
    return torch.cat([alone.new_zeros(model.axes, 1), alone], 1)


def _heads(model: ModelBridge, positions: Tensor) -> list[Tensor]:
    """Of each layer with attention: [T, heads of queries and of keys, d], of largest value 1 each."""
    heads: list[Tensor] = []

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor, rule: object = None) -> Tensor:
        heads.append(torch.cat([part.float() / part.float().abs().max() for part in (q, k)], 1))
        return q.new_zeros(*q.shape[:2], v.shape[2])

    table = model.decoder.table
    row = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(0)).to(table)
    embeds = table.new_zeros(positions.shape[1], 1, model.config.text.embedding_size)  # each token by itself
    embeds[..., : len(row)] = row * table[:256].float().std().to(table)
    with model.attention.of_step(attend, None):
        model.decode(embeds, positions[..., None])
    return heads


def _fit(heads: Tensor, pairs: Tensor, table: Tensor, positions: Tensor) -> _Fit:
    """The axis and the frequency that each pair of values [2, pairs] follows, in all layers."""
    first, second = pairs
    z = torch.complex(heads[..., first], heads[..., second])
    z = z.transpose(0, 1).flatten(1, 2)  # [T, layers * heads, pairs]
    ratio = (z * z[:1].conj()).sum(1) / z[:1].abs().square().sum(1)
    angles = positions.float()[:, :, None] * table  # [axes, T, frequencies]
    expected = torch.polar(torch.ones_like(angles), angles)
    differences = ratio[None, :, :, None] - expected[:, :, None]  # [axes, T, pairs, frequencies]
    cost = differences.abs().square().sum(1)
    best, choice = cost.transpose(0, 1).flatten(1).min(1)
    own, own_axis = cost.diagonal(dim1=1, dim2=2).min(0)  # where they stand in the module's order
    is_own = own <= best + 1e-4 * len(z)
    axes = torch.where(is_own, own_axis, choice // len(table))
    places = torch.where(is_own, torch.arange(len(table), device=table.device), choice % len(table))
    error = (z - z[:1] * expected[axes, :, places].T[:, None]).abs().max()
    rest = heads[..., pairs.numel() :]
    if rest.shape[-1]:
        error = torch.maximum(error, (rest - rest[:, :1]).abs().max())
    return _Fit(float(error), table[places], axes)


def _padded(fit: _Fit, pairs: Tensor, dim: int, gain: float) -> Rotation:
    """What is not rotated has a frequency of zero, in both halves."""
    rest = torch.arange(pairs.numel(), dim).view(2, -1)
    order = torch.cat([pairs, rest], 1).flatten().to(fit.axes.device)
    zeros = fit.axes.new_zeros(rest.shape[1])
    return Rotation(order, torch.cat([fit.frequencies, zeros.float()]), torch.cat([fit.axes, zeros]), gain)
