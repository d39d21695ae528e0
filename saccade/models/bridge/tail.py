"""What becomes of the head's output: some models scale it, or keep it within a cap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.models.bridge.errors import Unfit

_FACTORS = (
    "logit_scale",
    "logits_scaling",
    "logits_mup_width_multiplier",
    "output_multiplier",
    "lm_head_multiplier",
)
_CAPS = ("final_logit_softcapping",)


class Tail(NamedTuple):
    gain: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits * self.gain if self.gain != 1 else logits
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def tail_of(text: Any, logits: Tensor, expected: Tensor, tolerance: float) -> Tail:
    """Found by comparison, as the same field means something in one wrapper of a decoder and nothing in another."""
    for tail in _candidates(text):
        if float((tail(logits) - expected).abs().max()) <= tolerance * float(expected.abs().max()):
            return tail
    raise Unfit("its logits are not what its head makes of hidden states, nor that scaled or capped")


def _candidates(text: Any) -> Iterator[Tail]:
    """`text`: the decoder's config."""
    factors = [float(value) for name in _FACTORS if (value := getattr(text, name, None))]
    caps = [float(value) for name in _CAPS if (value := getattr(text, name, None))]
    for cap in (None, *caps):
        for gain in (1.0, *factors, *(1 / factor for factor in factors)):
            yield Tail(gain, cap)
