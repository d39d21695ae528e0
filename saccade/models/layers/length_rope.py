"""Ropes of Transformers that turn a whole sequence by other frequencies once it is long.

Their code looks at the largest position it is given, which is right for one sequence and wrong for a step of many, or
for a piece of one. Here each token says how long its own request was when the rope was chosen:

    switch 8       prompt of 6, positions 0 .. 5          prompt of 10, positions 0 .. 9
    lengths        5 5 5 5 5 5 | 6 7 8 9 (its answer)     9 9 9 9 9 9 9 9 9 9 | 10 11 ...
    frequencies    short ............ long                long ...

That is what their `generate` does: a prompt is turned as a whole, and an answer's tokens as they come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Unfit(Exception):
    """Why a model cannot be served, as the end of a sentence that begins with its name."""


class LengthRope(nn.Module):
    def __init__(self, rope: Any, switch: int) -> None:
        super().__init__()
        self.rope = rope
        self.switch = switch
        self.lengths: Tensor | None = None  # [T]: see above; None: one whole sequence, as the library means it

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        if self.lengths is None:
            whole: tuple[Tensor, ...] = self.rope(x, position_ids)
            return whole
        is_long = self.lengths >= self.switch
        short: tuple[Tensor, ...] = self.rope(x, position_ids.masked_fill(is_long, 0))
        if not is_long.any():
            return short
        beyond = torch.full_like(position_ids[:, :1], self.switch)  # a position that makes it a long sequence
        long = self.rope(x, torch.cat([position_ids, beyond], 1))
        return tuple(torch.where(is_long[:, None], b[:, :-1], a) for a, b in zip(short, long, strict=True))


def follow_lengths(text: Any, switch: int | None, window: int) -> LengthRope | None:
    """Put such a rope into the text model if it has one. `switch` is what prompts are made for.

    Unfit where the rope changes in another way within a context of `window` tokens.
    """
    made = None
    for name, module in list(text.named_modules()):
        minimum = _min_switch(module)
        if minimum is None:
            continue
        if module.rope_type == "longrope" and minimum == switch and made is None:
            parent, _, own = name.rpartition(".")
            made = LengthRope(module, minimum)
            setattr(text.get_submodule(parent), own, made)
        elif window > minimum:
            raise Unfit(
                f"beyond {minimum} tokens its rope ({module.rope_type}) changes with a prompt's length in a way we do "
                f"not follow; --max-model-len {minimum} avoids that"
            )
    return made


def _min_switch(module: Any) -> int | None:
    """The fewest tokens beyond which a rope depends on how many there are; None: it never does."""
    kind = getattr(module, "rope_type", None)
    kinds: dict[str | None, str] = kind if isinstance(kind, dict) else {None: str(kind)}
    rules = module.config.rope_parameters if kind is not None else {}
    found = [
        module.original_max_seq_len
        if "dynamic" in name
        else (rules if layer is None else rules[layer])["original_max_position_embeddings"]
        for layer, name in kinds.items()
        if "dynamic" in name or name == "longrope"
    ]
    return min(found, default=None)
