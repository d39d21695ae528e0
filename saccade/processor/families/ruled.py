"""A model that runs through Transformers, on paper: what its counting rule says, without that library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from saccade.processor.families import base
from saccade.processor.families.base import Files
from saccade.processor.families.counting_rules import Rule, marks_in
from saccade.types.media import Geometry, Grid, Size

_TRIED = (Size(64, 64), Size(512, 512), Size(1280, 960), Size(960, 1280), Size(2048, 2048), Size(4000, 1000))


@dataclass(frozen=True, slots=True)
class Ruled:
    rule: Rule
    patch_size: int
    length: Callable[[str], int]  # tokens of a text around pictures
    image_token_id: int
    placeholder_ids: tuple[int, ...]

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        assert files.config.vision is not None, "its config was read with a tower's defaults"
        token = files.config.image_token_id or 0
        return cls(Rule(files), files.config.vision.patch_size, _lengths(files.path), token, (token,))

    @property
    def is_fixed_size(self) -> bool:
        return self.rule.limits is None

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        return self.rule.policy(min_pixels, max_pixels)

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        return base.tag({"limits": (min_pixels, max_pixels)})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        image = self.rule(self.rule.limited(size, min_pixels, max_pixels))
        tokens = sum(run.tokens for run in image.runs) + sum(map(self.length, image.texts))
        patches = max(1, image.area // self.patch_size**2)
        return Geometry(image.resized, Grid(1, patches, 1), tokens, tokens)

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        return max((self.geometry(size, min_pixels, max_pixels) for size in _TRIED), key=lambda g: g.slots)

    expand = base.expand_to_embeddings
    positions = base.sequential_positions


def _lengths(path: Path) -> Callable[[str], int]:
    """A name in angle brackets is one token; of other text the tokenizer says how many, if there is one."""
    file = path / "tokenizer.json"

    @cache
    def tokenizer() -> Tokenizer | None:
        return Tokenizer.from_file(str(file)) if file.is_file() else None

    def one(mark: str) -> int:
        if mark.startswith("<") or (known := tokenizer()) is None:
            return 1
        return len(known.encode(mark, add_special_tokens=False).ids)

    return lru_cache(maxsize=1024)(lambda text: sum(map(one, marks_in(text))))
