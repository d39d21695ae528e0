"""Several images in one call of the model's own code, where their inputs can stand one after the other.

[1, T]         of a prompt's tokens: along T
other tensors  along the axis that gives each image the embeddings that it has alone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from saccade.models.bridge.errors import Unfit
from saccade.types.media import Size

Inputs = Mapping[str, Any]  # of an image alone


class Together(NamedTuple):
    axis: int
    takes_sizes: bool  # different ones; else images of one size alone

    def groups(self, sizes: Sequence[Size | None]) -> Iterator[int]:
        """How many of these, in order, go through the tower in each call. Blank ones have no size."""
        if self.takes_sizes and None not in sizes:
            yield len(sizes)
            return
        for size, group in groupby(sizes):
            count = len(list(group))
            yield from [1] * count if size is None else [count]

    def join(self, inputs: Sequence[Inputs]) -> dict[str, Any]:
        """Raises Unfit if they are no tensors of one kind."""
        if len(inputs) == 1:
            return dict(inputs[0])
        tokens = [one["input_ids"].shape[1] for one in inputs]
        flat, structures = zip(*(pytree.tree_flatten(dict(one)) for one in inputs), strict=True)
        if any(structure != structures[0] for structure in structures):
            raise Unfit("inputs of images differ in kind")
        leaves = [self._joined(leaves, tokens) for leaves in zip(*flat, strict=True)]
        joined: dict[str, Any] = pytree.tree_unflatten(leaves, structures[0])
        return joined

    def _joined(self, leaves: Sequence[Any], tokens: Sequence[int]) -> Any:
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            if any(leaf != leaves[0] for leaf in leaves):
                raise Unfit("inputs of images differ in what is no tensor")
            return leaves[0]
        of_tokens = all(leaf.shape[:2] == (1, count) for leaf, count in zip(leaves, tokens, strict=True))
        return torch.cat(list(leaves), 1 if of_tokens else min(self.axis, leaves[0].dim() - 1))


KINDS = tuple(Together(axis, takes_sizes=sizes) for sizes in (True, False) for axis in (0, 1))
