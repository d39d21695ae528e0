"""Basic layers of decoders and vision towers: linear, norms, activations, RoPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.state_dict import Parameters


class Linear:
    """x @ weight.T + bias. Several projections of one input are one GEMM: give `outputs` as {name: size}.

    `pad_outputs` pads each of them with zero rows to a multiple, `pad_inputs` the weight with zero columns,
    so that the tensor between two GEMMs can be wider than in the checkpoint.
    """

    def __init__(
        self,
        params: Parameters,
        inputs: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool = False,
        pad_inputs: int = 1,
        pad_outputs: int = 1,
    ) -> None:
        parts = {"": outputs} if isinstance(outputs, int) else outputs
        sizes = [_up_to(size, pad_outputs) for size in parts.values()]
        self.weight = params.empty(sum(sizes), _up_to(inputs, pad_inputs))  # [outputs, inputs]
        self.bias = params.empty(sum(sizes)) if bias else None  # [outputs]
        for (name, size), rows in zip(parts.items(), torch.split(self.weight, sizes), strict=True):
            params.add(_join(name, "weight"), _own_part(rows, size, inputs))
        if self.bias is not None:
            for (name, size), values in zip(parts.items(), torch.split(self.bias, sizes), strict=True):
                params.add(_join(name, "bias"), _own_part(values, size))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PatchLinear:
    """Patch embedding: a convolution with stride = kernel, as a GEMM over [patches, patch_dim]."""

    def __init__(self, params: Parameters, kernel: tuple[int, ...], outputs: int, bias: bool = False) -> None:
        stored = params.new("weight", outputs, *kernel)
        self.weight = stored.view(outputs, -1)  # [outputs, patch_dim]
        self.bias = params.new("bias", outputs) if bias else None

    def __call__(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.weight, self.bias)


class RMSNorm:
    def __init__(self, params: Parameters, size: int, eps: float) -> None:
        self.weight = params.new("weight", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm:
    def __init__(self, params: Parameters, size: int, eps: float) -> None:
        self.weight = params.new("weight", size)
        self.bias = params.new("bias", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), in place: this is a vision tower's widest tensor."""
    return F.silu(x.mul_(1.702), inplace=True).mul_(1 / 1.702)


def silu_and_mul(x: Tensor) -> Tensor:
    """[T, gate | up] -> silu(gate) * up [T, half], in place of the gate."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


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


def gated_activation(name: str) -> Activation:
    """The same for a gated MLP: [T, gate | up] -> [T, half]."""
    known = {"silu": silu_and_mul, "gelu": gelu_and_mul}
    if name not in known:
        raise ConfigError(f"config.json asks for the gated hidden_act {name!r}; known are {', '.join(known)}")
    return known[name]


def frequencies(rotated: int, theta: float, device: torch.device) -> Tensor:
    """RoPE's inverse frequencies of `rotated` dimensions: float32 [rotated / 2], from 1 to 1 / theta."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
    return 1.0 / theta**exponents


def cos_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles [..., d / 2] -> cos and sin for `rotate`, both [..., d]; the first half of sin is negated."""
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: rotate dimensions i and i + d / 2 of x [..., d] as a pair."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return swapped.mul_(sin).addcmul_(x, cos)


def _own_part(padded: Tensor, *sizes: int) -> Tensor:
    """The view of these sizes; the padding around it is set to zero."""
    if padded.shape == sizes:
        return padded
    padded.zero_()
    return padded[tuple(slice(size) for size in sizes)]


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
