"""A small tower in place of timm's, for a machine without that library: what two families read of a picture.

Their checkpoints name an architecture of this file, which timm does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

TOKENS = "small_tokens"  # a class token before those of the patches: [images, 1 + patches, size]
MAP = "small_map"  # [images, size, rows, columns]


class Tower(nn.Module):
    def __init__(self, architecture: str, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.maps = architecture == MAP
        self.patches = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        self.first = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.layer = nn.TransformerEncoderLayer(embed_dim, 4, 64, 0.0, batch_first=True, norm_first=True)

    def forward_features(self, pixels: Tensor, **_: Any) -> Tensor:
        grid = self.patches(pixels)
        rows = torch.cat([self.first.expand(len(pixels), -1, -1), grid.flatten(2).transpose(1, 2)], dim=1)
        rows = self.layer(rows)
        return rows[:, 1:].transpose(1, 2).reshape(grid.shape) if self.maps else rows


def create_model(architecture: str, *, pretrained: bool, num_classes: int, **shape: Any) -> Tower:
    assert not pretrained
    assert num_classes == 0  # no head
    return Tower(architecture, **shape)


@contextmanager
def provided() -> Iterator[None]:
    """Transformers with the towers of this file, though timm is not installed."""
    wrapper = import_module("transformers.models.timm_wrapper.modeling_timm_wrapper")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "timm", SimpleNamespace(create_model=create_model), raising=False)
        patch.setattr(wrapper, "requires_backends", lambda *_: None)
        yield
