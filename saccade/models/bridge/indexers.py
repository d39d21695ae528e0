"""Layers that attend to tokens which an indexer selects. Within its budget those are all: ours needs none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_SELECTED = ("index_topk", "topk_blocks", "token_budget", "block_topk")  # numbers of an indexer
_ALL = 8192  # more than tokens of a proof


class Indexers:
    """Those of a decoder, left out. `budget`: tokens of a context that has all of them selected."""

    def __init__(self, text: Any) -> None:
        layers = [getattr(module, "indexer", None) for module in text.modules()]
        self.modules = [indexer for indexer in layers if isinstance(indexer, torch.nn.Module)]
        self.budget = min((_budget(indexer) for indexer in self.modules), default=None)
        self._forwards = [indexer.forward for indexer in self.modules]
        self._switch(to_ours=True)

    def mask(self, device: torch.device) -> Tensor | None:
        """Indexers read a mask, and make one for attention, which ours ignores."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if self.modules else None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Transformers' indexers, which select all."""
        numbers = [
            (indexer, name, getattr(indexer, name))
            for indexer in self.modules
            for name in _SELECTED
            if hasattr(indexer, name)
        ]
        self._switch(to_ours=False)
        for indexer, name, _ in numbers:
            setattr(indexer, name, _ALL)
        try:
            yield
        finally:
            for indexer, name, number in numbers:
                setattr(indexer, name, number)
            self._switch(to_ours=True)

    def _switch(self, *, to_ours: bool) -> None:
        for indexer, own in zip(self.modules, self._forwards, strict=True):
            indexer.forward = _first if to_ours else own


def _budget(indexer: Any) -> int:
    if hasattr(indexer, "topk_blocks"):
        return int(indexer.topk_blocks) * int(indexer.block_size)
    return int(getattr(indexer, "token_budget", None) or indexer.index_topk)


def _first(*arguments: Any, **named: Any) -> Tensor:
    """The first token for each query [B, T, 1]."""
    hidden: Tensor = arguments[0] if arguments else named["hidden_states"]
    return torch.zeros(*hidden.shape[:2], 1, dtype=torch.int64, device=hidden.device)
