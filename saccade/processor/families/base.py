"""What a model family must say about pictures, and the parts the families share. Pure functions of sizes and ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from saccade.checkpoint.config import ModelConfig, VisionConfig
from saccade.errors import ConfigError, RequestError
from saccade.types import TO_THE_END, Geometry, Grid, Size, Span

MAX_ASPECT_RATIO = 200
"""Longer pictures are refused for every family: a thin strip costs far more to resize than its tokens say."""


class Files(Protocol):
    """The part of a checkpoint that a family reads."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def image_processor(self) -> Mapping[str, Any]: ...
    @property
    def video_processor(self) -> Mapping[str, Any]: ...
    @property
    def processor(self) -> Mapping[str, Any]: ...


class Expansion(NamedTuple):
    """The tokens that stand for one picture in the prompt."""

    token_ids: npt.NDArray[np.int64]  # [tokens]
    is_embed: tuple[bool, ...] | None  # which of them take an embedding; None means all
    is_cross_attended: bool = False  # the tokens behind them look at the picture too, as `cross_attended` says


class Family(Protocol):
    """How a header becomes a grid and tokens, and what positions the tokens get."""

    @property
    def is_fixed_size(self) -> bool:
        """Every picture costs the same; pixel limits have no effect."""

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self: ...

    @property
    def image_token_id(self) -> int | None:
        """The token that stands for a picture; None for a model that takes none."""

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Every token that stands for media; a client's text must never contain one."""

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """The pixel limits in force: what is given, else the checkpoint's."""

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        """Every setting that decides which pixels reach the encoder, for the content key."""

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry: ...

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """At least as many tokens as any picture can have under these limits."""

    def expand(self, geometry: Geometry) -> Expansion: ...

    def positions(
        self, token_ids: Sequence[int] | npt.NDArray[np.int64], spans: Sequence[Span], grids: Sequence[Grid]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Rotary positions [axes, tokens] and the position of the first generated token."""


@runtime_checkable
class ManyImagesPolicy(Protocol):
    """A family whose pictures are seen smaller where a prompt has many."""

    def among(self, images: int, max_pixels: int) -> int:
        """The limit for each of so many pictures, where one alone may have `max_pixels`."""


@runtime_checkable
class HasMarkup(Protocol):
    """A family whose tokenizer has control tokens that questions and answers are meant to contain."""

    @property
    def markup(self) -> tuple[str, ...]:
        """What is pointed at, and where it is, for instance."""


@runtime_checkable
class LengthBound(Protocol):
    """A family whose keys and values depend on how long a prompt is, not only on the tokens before them."""

    def root(self, salt: bytes, tokens: int) -> bytes:
        """A salt that prompts share only if equal beginnings mean equal keys and values."""


def cross_attended(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans that later tokens look at: each until the next one begins, and neighbours together as one.

    text A text B C text      A is seen up to B, B and C to the end
    """
    seen: list[Span] = []
    end = TO_THE_END
    for index in reversed(range(len(spans))):
        span, behind = spans[index], spans[index + 1 : index + 2]
        if behind and span.end < behind[0].start:
            end = behind[0].start
        seen.append(replace(span, last_reader=end))
    return tuple(reversed(seen))


def plain_positions(token_ids: Sequence[int] | npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], int]:
    """One axis, on which pictures count as text does: [1, tokens], and the position behind the last."""
    return np.arange(len(token_ids), dtype=np.int32)[None], len(token_ids)


def in_order(min_pixels: int, max_pixels: int) -> tuple[int, int]:
    if min_pixels > max_pixels:
        raise ConfigError(
            f"min_pixels={min_pixels} is above max_pixels={max_pixels}; raise max_pixels or lower min_pixels"
        )
    return min_pixels, max_pixels


def vision_and_token(files: Files) -> tuple[VisionConfig, int]:
    """What every family of pictures needs."""
    config = files.config
    if config.vision is None or config.image_token_id is None:
        missing = "vision_config" if config.vision is None else "image_token_id (or image_token_index)"
        raise ConfigError(f"config.json has no {missing}, so this model takes no pictures")
    return config.vision, config.image_token_id


def check_agreement(file: str, given: Mapping[str, Any], ours: Mapping[str, int]) -> None:
    """What two files of a checkpoint say must be the same: pictures are cut here as the tower takes them."""
    for name, here in ours.items():
        if given.get(name) not in (None, here):
            raise ConfigError(
                f"{file} says {name}={given[name]}, but config.json says {here}; the two files do not belong together"
            )


def tower_sides(vision: VisionConfig) -> dict[str, int]:
    """In the words of image processors."""
    merge, frames = vision.spatial_merge_size, vision.temporal_patch_size
    return {"patch_size": vision.patch_size, "merge_size": merge, "temporal_patch_size": frames}


def check_aspect_ratio(size: Size) -> None:
    ratio = max(size) / min(size)
    if ratio > MAX_ASPECT_RATIO:
        raise RequestError(
            f"the picture is {size.width}x{size.height}, an aspect ratio of {ratio:.1f}; at most {MAX_ASPECT_RATIO} is "
            "allowed",
            code="image_too_large",
        )


def tag(settings: Mapping[str, Any]) -> bytes:
    return json.dumps(settings, sort_keys=True).encode()


def pixel_settings(image_processor: Mapping[str, Any]) -> dict[str, Any]:
    """The settings all image processors share. Absent ones stay out: two checkpoints never share a key anyway."""
    names = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    return {name: image_processor[name] for name in names if name in image_processor}
