"""Weights of Transformers' layers that stay in float8, or packed in INT4, as a checkpoint has them.

A module that has one reads it dequantised under the old name, so Transformers' own code computes with it and
is the reference. What multiplies it as it is asks for `stored_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.models import fp8_weights, int4_weights
from saccade.models.fp8_weights import FP8, has_blocks
from saccade.models.int4_weights import GroupScales, hash_of
from saccade.models.state_dict import Scales

_APART = {"gate", "router", "shared_expert", "shared_experts"}  # routers, and what runs beside experts
_EXPERTS = ("gate_up_proj", "down_proj")


class Stored(NamedTuple):
    weight: Tensor  # float8 or int16 [outputs, inputs], or of experts, stacked
    scales: Scales
    dtype: torch.dtype  # of what it stands for

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.scales, GroupScales):
            return (*self.weight.shape[:-1], int4_weights.inputs_of(self.weight))
        return tuple(self.weight.shape)

    def dequantized(self) -> Tensor:
        if isinstance(self.scales, GroupScales):
            flat = self.weight.flatten(0, -2), _flat(self.scales)
            return int4_weights.dequantized(*flat, self.dtype).view(self.shape)
        return fp8_weights.dequantized(self.weight, self.scales, self.dtype)

    def tensors(self) -> list[Tensor]:
        if isinstance(self.scales, Tensor):
            return [self.weight, self.scales]
        return [self.weight, *(part for part in self.scales if part is not None)]

    def rows(self, sizes: Sequence[int]) -> list[Stored]:
        """Its parts with so many rows each, those of experts one after the other."""
        weights = torch.split(self.weight.flatten(0, -2), list(sizes))
        if isinstance(self.scales, GroupScales):
            flat = _flat(self.scales)
            scales: list[Any] = [flat.at(slice(*ends)) for ends in pairwise((0, *accumulate(sizes)))]
        else:
            of_rows = self.scales.flatten(0, -2)
            step = self.weight.shape[-2] // self.scales.shape[-2]
            scales = list(torch.split(of_rows, [size // step for size in sizes]))
        return [Stored(*part, self.dtype) for part in zip(weights, scales, strict=True)]


def _flat(scales: GroupScales) -> GroupScales:
    return scales.changed(lambda numbers: numbers.flatten(0, -2))


def candidates(layers: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Weights of a decoder's layers that may be kept: the module, the name it has there, and among all."""
    for path, module in layers.named_modules():
        if _APART & set(path.split(".")):
            continue
        if type(module) is nn.Linear:
            yield module, "weight", path
        elif are_stacked(module):
            yield from ((module, name, f"{path}.{name}") for name in _EXPERTS)


def are_stacked(module: nn.Module) -> bool:
    """Whether these are experts as ours are: [E, 2 I, H] and [E, H, I]."""
    if not all(name in module._parameters or stored_of(module, name) for name in _EXPERTS):
        return False
    gate_up, down = (shape_of(module, name) for name in _EXPERTS)
    return len(gate_up) == 3 and down == (gate_up[0], gate_up[2], gate_up[1] // 2)


def keep(module: nn.Module, name: str, stored: Stored) -> None:
    """From here on the module's weight is this one, dequantised whenever it is read."""
    vars(module).setdefault("stored", {})[name] = stored
    if name in module._parameters:
        del module._parameters[name]
        kind = type(module)
        read = property(lambda self: stored_of(self, name).dequantized())
        module.__class__ = type(kind.__name__, (kind,), {name: read})


def restore(matrix: Any) -> None:
    """As one that was never quantised."""
    stored = stored_of(matrix)
    if stored is not None:
        del matrix.stored
        matrix.__class__ = nn.Linear
        matrix.weight = nn.Parameter(stored.dequantized(), requires_grad=False)


def unify_experts(layers: nn.Module) -> None:
    """Experts that are stored in part become plain: both of their weights run together."""
    for module in layers.modules():
        names = [name for name in _EXPERTS if stored_of(module, name) is not None]
        if len(names) == 1:
            weight = stored_of(module, names[0]).dequantized()
            del vars(module)["stored"]
            module.__class__ = type(module).__mro__[1]
            setattr(module, names[0], nn.Parameter(weight, requires_grad=False))


def stored_of(module: Any, name: str = "weight") -> Any:
    """None: the weight is in the model's dtype."""
    return vars(module).get("stored", {}).get(name)


def has_experts(layers: nn.Module) -> bool:
    """Whether some are stored."""
    return any(stored_of(module, name) is not None for module in layers.modules() for name in _EXPERTS)


def is_matrix(module: Any) -> bool:
    """Whether it computes what `nn.Linear` does."""
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and stored_of(module) is not None)


def is_in_blocks(matrix: Any) -> bool:
    """Whether it is in float8, with scales of blocks."""
    return kind_of(matrix) == (FP8, True)


def dtype_of(matrix: Any) -> torch.dtype:
    return (stored_of(matrix) or matrix.weight).dtype  # type: ignore[no-any-return]


def shape_of(module: Any, name: str) -> tuple[int, ...]:
    """Without dequantising anything."""
    return tuple((stored_of(module, name) or getattr(module, name)).shape)


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and what is stored."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, part in module.named_modules():
        for name, stored in vars(part).get("stored", {}).items():
            for tensor in stored.tensors():
                yield f"{path}.{name}".lstrip("."), tensor


def side_by_side(matrices: Sequence[Any]) -> Stored | None:
    """One weight of all their rows; None: they are not stored, or not alike."""
    stored: list[Stored] = [part for matrix in matrices if (part := stored_of(matrix)) is not None]
    if not stored or len(set(map(kind_of, matrices))) > 1:
        return None
    if len(stored) == 1:
        return stored[0]
    weight = torch.cat([part.weight for part in stored])
    scales: list[Any] = [part.scales for part in stored]
    if isinstance(scales[0], Tensor):
        return Stored(weight, torch.cat(scales), stored[0].dtype)
    zeros = None if scales[0].zeros is None else torch.cat([one.zeros for one in scales])
    of_groups = GroupScales(torch.cat([one.scales for one in scales]), zeros, scales[0].order)
    return Stored(weight, of_groups, stored[0].dtype)


def kind_of(matrix: Any) -> tuple[object, ...]:
    """What linears have in common whose weights can be one."""
    stored = stored_of(matrix)
    if stored is None:
        return (matrix.weight.dtype,)
    scales = stored.scales
    if isinstance(scales, Tensor):
        return FP8, has_blocks(stored.weight, scales)
    return scales.scales.dtype, scales.scales.shape[1:], scales.zeros is None, hash_of(scales.order)
