"""How far back the layers of a model read."""

from __future__ import annotations

from typing import NamedTuple


class AttentionReach(NamedTuple):
    """Of a model whose layers all have windows or chunks: what a token reads of those before it."""

    tokens: int  # the last ones, itself included
    has_prompt: bool = False  # and all of the prompt
