"""Activations by the names that configs give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from saccade.errors import ConfigError

Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), in place: this is a vision tower's widest tensor."""
    return F.silu(x.mul_(1.702), inplace=True).mul_(1 / 1.702)


def silu_and_mul(x: Tensor) -> Tensor:
    """[T, gate | up] -> silu(gate) * up [T, half], in place of the gate."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


def tanh_gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return tanh_gelu(gate).mul_(up)


def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def activation(name: str) -> Activation:
    """The activation of this name. It may overwrite its argument."""
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"config.json asks for the activation {name!r} (hidden_act or projector_hidden_act); known are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def gate_and_mul(x: Tensor, *, gelu: bool) -> Tensor:
    """The gate of most decoders, or that of Gemma's."""
    if gelu:
        return tanh_gelu_and_mul(x)
    return silu_and_mul(x)


def gated_activation(name: str) -> Activation:
    """The same for a gated MLP: [T, gate | up] -> [T, half]."""
    activations = {"silu": silu_and_mul, "gelu": gelu_and_mul}
    if name not in activations:
        raise ConfigError(
            f"config.json asks for the gated hidden_act {name!r}; known are {', '.join(activations)}"
        )
    return activations[name]
