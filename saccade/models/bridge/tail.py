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
NEVER = -1e4  # which half precision holds


class Tail(NamedTuple):
    gain: float = 1.0
    cap: float | None = None
    banned: Tensor | None = None  # [vocabulary]: tokens that a model never says

    def __call__(self, logits: Tensor) -> Tensor:
        if self.gain != 1:
            logits = logits * self.gain
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if self.banned is None else logits.masked_fill(self.banned, NEVER)

    @property
    def is_plain(self) -> bool:
        return self.gain == 1 and self.cap is None and self.banned is None


def tail_of(text: Any, logits: Tensor, expected: Tensor, tolerance: float) -> Tail:
    """Found by comparison: the same field means something in one wrapper of a decoder, nothing in another.

    The closest counts: what a cap of 30 does to logits of 5 is within a tolerance, and to those of 30 is not.
    `expected` [T, vocabulary] of the model itself has `NEVER` or less for what it never says.
    """
    banned = (expected <= NEVER).all(0)
    rest = expected[:, ~banned]
    logits = logits[:, ~banned]
    differences = {tail: float((tail(logits) - rest).abs().max()) for tail in _candidates(text)}
    closest = min(differences, key=differences.__getitem__)
    if not differences[closest] <= tolerance * float(rest.abs().max()):
        raise Unfit("its logits are not what its head makes of hidden states, nor that scaled or capped")
    return closest._replace(banned=banned) if bool(banned.any()) else closest


def _candidates(text: Any) -> Iterator[Tail]:
    """`text`: the decoder's config."""
    factors = [float(value) for name in _FACTORS if (value := getattr(text, name, None))]
    caps = [float(value) for name in _CAPS if (value := getattr(text, name, None))]
    for cap in (None, *caps):
        for gain in (1.0, *factors, *(1 / factor for factor in factors)):
            yield Tail(gain, cap)
