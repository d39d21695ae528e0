"""Text-only models: images are refused; sequential RoPE positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from saccade.errors import RequestError
from saccade.processor.families.base import Expansion, Files, sequential_positions
from saccade.types.media import Geometry, Grid, Size


@dataclass(frozen=True, slots=True)
class Text:
    model_type: str
    image_token_id: None = None
    placeholder_ids: tuple[int, ...] = ()
    is_fixed_size: bool = True

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        return cls(files.config.model_type)

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        return 0, 0

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        return b""

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        raise RequestError(f"a model of type {self.model_type!r} takes no pictures", code="unsupported")

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        return Geometry(Size(0, 0), Grid(0, 0, 0), 0, 0)

    def expand(self, geometry: Geometry) -> Expansion:
        return Expansion(np.empty(0, np.int64), None)

    positions = sequential_positions
