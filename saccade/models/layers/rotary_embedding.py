"""RoPE: frequencies, cosines and sines, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.errors import ConfigError
from saccade.models.settings import setting


def frequencies(rotated: int, theta: float, device: torch.device) -> Tensor:
    """RoPE's inverse frequencies of `rotated` dimensions: float32 [rotated / 2], from 1 to 1 / theta."""
    if device.type == "meta":  # of a decoder that is left out; such arithmetic would load PyTorch's compiler
        device = torch.device("cpu")
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


class Rotary:
    """RoPE, and M-RoPE, where each section of the frequencies has its own axis (time, height, width)."""

    def __init__(self, text: TextConfig, device: torch.device) -> None:
        base = frequencies(text.head_dim, text.rope_theta, device)
        self.frequencies = _scale(base, text)  # float32 [d / 2]
        # YaRN's factor of queries and keys. Attention multiplies scores by its square instead.
        self.gain = _yarn_gain(text.rope_scaling) if _kind(text.rope_scaling) == "yarn" else 1.0
        sections = text.mrope_section or (text.head_dim // 2,)
        if sum(sections) != text.head_dim // 2:
            rule = f"half the head size {text.head_dim}"
            raise ConfigError(f"mrope_section {list(sections)} must add up to {rule}")
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]  # 2, 3 -> 0 0 1 1 1
        if text.rope_scaling.get("mrope_interleaved"):
            axes = _interleaved(sections)
        self.axes = torch.tensor(axes, device=device)  # int64 [d / 2]: the axis of each frequency

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[axes, T] -> cos and sin, each [T, 1, d]."""
        per_frequency = positions.float().index_select(0, self.axes)  # [d / 2, T]
        angles = per_frequency.T * self.frequencies  # [T, d / 2]
        return cos_sin(angles[:, None], dtype)


def _interleaved(sections: Sequence[int]) -> list[int]:
    """Sizes 4, 2, 2 -> 0 1 2 0 1 2 0 0: axes alternate until used up, the first one fills the rest."""
    axes = []
    for index in range(sum(sections)):
        axis = index % len(sections)
        axes.append(axis if index < sections[axis] * len(sections) else 0)
    return axes


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(setting(scaling, "rope_type", setting(scaling, "type", "default")))


def _scale(base: Tensor, text: TextConfig) -> Tensor:
    kind = _kind(text.rope_scaling)
    factor = float(setting(text.rope_scaling, "factor", 1))
    if kind in ("default", "mrope"):
        return base
    if kind == "linear":
        return base / factor
    shares = {"llama3": _llama3_share, "yarn": _yarn_share}
    if kind not in shares:
        names = f"known are {', '.join(('default', 'mrope', 'linear', *shares))}"
        raise ConfigError(f"config.json asks for rope scaling of type (rope_type) {kind!r}; {names}")
    trained = int(setting(text.rope_scaling, "original_max_position_embeddings", text.max_position))
    share = shares[kind](base, text, trained)
    return share * base + (1 - share) * base / factor


def _llama3_share(base: Tensor, text: TextConfig, trained: int) -> Tensor:
    """The share of each frequency that is not scaled: 1 for short wavelengths, 0 for long ones."""
    low = float(setting(text.rope_scaling, "low_freq_factor", 0))
    high = float(setting(text.rope_scaling, "high_freq_factor", 0))
    if not low or not high or low >= high:
        rule = f"low_freq_factor={low} below high_freq_factor={high}"
        raise ConfigError(f"rope scaling of type llama3 needs {rule}")
    rotations = base * trained / (2 * math.pi)  # over the length the model was trained on
    return ((rotations - low) / (high - low)).clamp(0, 1)


def _yarn_share(base: Tensor, text: TextConfig, trained: int) -> Tensor:
    """The same, linear along the index of a frequency, from beta_fast to beta_slow."""
    scaling = text.rope_scaling

    def index_of(rotations: float) -> float:
        return text.head_dim / 2 * math.log(trained / (rotations * 2 * math.pi)) / math.log(text.rope_theta)

    first = index_of(float(setting(scaling, "beta_fast", 32)))
    last = index_of(float(setting(scaling, "beta_slow", 1)))
    if scaling.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, text.head_dim - 1)
    index = torch.arange(len(base), dtype=torch.float32, device=base.device)
    return 1 - ((index - first) / max(last - first, 1e-3)).clamp(0, 1)


def _yarn_gain(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    above = scaling.get("mscale")
    below = scaling.get("mscale_all_dim")
    if not above or not below:
        return yarn_gain(scaling, 1)
    return yarn_gain(scaling, above) / yarn_gain(scaling, below)


def yarn_gain(scaling: Mapping[str, Any], weight: float) -> float:
    return 0.1 * weight * math.log(max(float(setting(scaling, "factor", 1)), 1)) + 1
