"""A vision tower of four layers made of additions."""

from __future__ import annotations

import io
import threading
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.types.media import Geometry, Grid, Header, MediaItem, Size

LAYERS = 4


class FakeTower:
    """Embeds each picture as its mean colour; remembers what it was asked for."""

    config: Any = None
    together = 1  # layers between two pauses

    def __init__(self) -> None:
        self.ran = 0  # layers
        self.passes: list[list[int]] = []  # patches of each picture, per pass
        self.live = 0  # prepared patches not yet consumed by a pass
        self.peak = 0
        self.lock = threading.Lock()
        self.break_on: set[int] = set()  # patch counts that run out of memory

    def prepare(self, image: np.ndarray, geometry: Geometry) -> Tensor:
        patches = geometry.grid.patches
        with self.lock:
            self.live += patches
            self.peak = max(self.peak, self.live)
        return torch.full((patches, 1), float(image.mean()))

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[int, None, list[Tensor]]:
        sizes = [grid.patches for grid in grids]
        self.passes.append(sizes)
        for _ in range(LAYERS // self.together):
            if self.break_on & set(sizes):
                raise RuntimeError("out of memory")
            self.ran += self.together
            yield self.together
        with self.lock:
            self.live -= sum(sizes)
        return [part[: len(part) // 4] for part in patches.split(sizes)]


def picture(name: str, side: int = 4, value: int = 7, data: bytes | None = None) -> MediaItem:
    if data is None:
        stream = io.BytesIO()
        Image.new("RGB", (side, side), (value,) * 3).save(stream, "PNG")
        data = stream.getvalue()
    grid = Grid(1, side, side)
    geometry = Geometry(Size(side, side), grid, grid.patches // 4, grid.patches // 4)
    return MediaItem(name.encode(), "image", data, Header("png", Size(side, side), 1, 1, "RGB"), geometry)
