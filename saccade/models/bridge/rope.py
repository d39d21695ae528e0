"""LongRoPE for packed steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.bridge.errors import Unfit


class LengthRope(nn.Module):
    """Transformers' module selects the factors by the largest position in the
    batch, which is wrong for several requests or for a chunk of one. Here each token has the length of its
    own request:

        switch 8       prompt of 6, positions 0 .. 5          prompt of 10, positions 0 .. 9
        lengths        5 5 5 5 5 5 | 6 7 8 9 (its output)     9 9 9 9 9 9 9 9 9 9 | 10 11 ...
        factors        short ............ long                long ...

    This equals `generate`: one choice for a whole prompt, then one for each output token.
    """

    def __init__(self, rope: Any, switch: int) -> None:
        super().__init__()
        self.rope = rope
        self.switch = switch
        self.lengths: Tensor | None = None  # [T]; None: one whole sequence, as Transformers expects

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        if self.lengths is None:
            whole: tuple[Tensor, ...] = self.rope(x, position_ids)
            return whole
        is_long = self.lengths >= self.switch
        short: tuple[Tensor, ...] = self.rope(x, position_ids.masked_fill(is_long, 0))
        if not is_long.any():
            return short
        beyond = torch.full_like(position_ids[:, :1], self.switch)  # a position that selects the long factors
        long = self.rope(x, torch.cat([position_ids, beyond], 1))
        return tuple(torch.where(is_long[:, None], b[:, :-1], a) for a, b in zip(short, long, strict=True))


def follow_lengths(text: Any, switch: int | None, window: int) -> LengthRope | None:
    """Replace LongRoPE in the text model, if it has one with this `switch`.

    Unfit if RoPE depends on the length in another way within a context of `window` tokens.
    """
    followed = None
    for name, module in list(text.named_modules()):
        minimum = _min_switch(module)
        if minimum is None:
            continue
        if module.rope_type == "longrope" and minimum == switch and followed is None:
            parent, _, attribute = name.rpartition(".")
            followed = LengthRope(module, minimum)
            setattr(text.get_submodule(parent), attribute, followed)
        elif window > minimum:
            raise Unfit(
                f"beyond {minimum} tokens its rope ({module.rope_type}) changes with a prompt's length in a "
                f"way we do not follow; --max-model-len {minimum} avoids that"
            )
    return followed


def _min_switch(module: Any) -> int | None:
    """The number of tokens beyond which a RoPE module depends on the length; None: it never does."""
    kind = getattr(module, "rope_type", None)
    if kind is None:
        return None
    rules = module.config.rope_parameters
    kinds: dict[str | None, str] = kind if isinstance(kind, dict) else {None: str(kind)}
    lengths = []
    for layer, name in kinds.items():
        if "dynamic" in name:
            lengths.append(module.original_max_seq_len)
        elif name == "longrope":
            lengths.append((rules if layer is None else rules[layer])["original_max_position_embeddings"])
    return min(lengths, default=None)
