"""The interface of a model family (vLLM: multimodal processor) and what families share. Pure functions."""

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
from saccade.types.media import Geometry, Size
from saccade.types.prompt import TO_THE_END, Prompt, Span

MAX_ASPECT_RATIO = 200
"""The limit of every family: resizing a thin strip costs far more than its tokens say."""

TokenIds = Sequence[int] | npt.NDArray[np.int64]
Positions = tuple[npt.NDArray[np.int32], int]
"""RoPE positions [axes, tokens], and the position of the first generated token."""


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
    """The prompt tokens of one image."""

    token_ids: npt.NDArray[np.int64]  # [tokens]
    is_embed: tuple[bool, ...] | None  # which of them take an embedding; None means all
    is_cross_attended: bool = False  # later tokens attend to the image, see `cross_attended`


class Family(Protocol):
    """How an image's size becomes a grid and tokens, and which RoPE positions the tokens get."""

    @property
    def is_fixed_size(self) -> bool:
        """Every image costs the same; pixel limits have no effect."""

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self: ...

    @property
    def image_token_id(self) -> int | None:
        """The placeholder of an image; None for a text model."""

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Every token that stands for media; client text must never contain one."""

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """The pixel limits in force: those given, else the checkpoint's."""

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        """Every setting that decides which pixels reach the encoder, for the content key."""

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry: ...

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """A geometry with at least as many tokens as any image can have under these limits."""

    def expand(self, geometry: Geometry) -> Expansion: ...

    def positions(
        self, token_ids: TokenIds, spans: Sequence[Span], geometries: Sequence[Geometry]
    ) -> Positions:
        """RoPE positions of an expanded prompt."""


@runtime_checkable
class ManyImagesPolicy(Protocol):
    """A family that resizes images further down if a prompt has many."""

    def max_pixels_for(self, images: int, max_pixels: int) -> int:
        """The limit for each of so many images, where a single one may have `max_pixels`."""


@runtime_checkable
class HasMarkup(Protocol):
    """A family whose tokenizer has control tokens that clients may write, such as those for grounding."""

    @property
    def markup(self) -> tuple[str, ...]: ...


@runtime_checkable
class FramesPrompt(Protocol):
    """A family whose processor puts tokens around prompts, or around images in them."""

    def spelled(self, text: str) -> str:
        """A prompt with the characters that its processor adds."""

    @property
    def grows(self) -> bool:
        """Whether a prompt with more tokens after it is read as the prompt, then those."""

    def framed(self, token_ids: npt.NDArray[np.int64], images: int) -> npt.NDArray[np.int64]:
        """With the tokens that it adds to a prompt of so many images."""


@runtime_checkable
class BindsPrompt(Protocol):
    """A family whose keys and values depend on what comes after them too, or on the prompt's length."""

    def bound(self, prompt: Prompt) -> Prompt:
        """With ranges that no window cuts, and a salt that prompts share only where equal prefixes mean equal
        keys and values."""


def cross_attended(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans with their last reader: tokens attend to an image until the next one; adjacent images act as one.

    text A text B C text      A is read up to B, B and C to the end
    """
    read: list[Span] = []
    end = TO_THE_END
    next_start = 0  # none follows the last one
    for span in reversed(spans):
        if span.end < next_start:
            end = next_start
        read.append(replace(span, last_reader=end))
        next_start = span.start
    return tuple(reversed(read))


class _HasImageToken(Protocol):
    @property
    def image_token_id(self) -> int: ...


def expand_to_embeddings(family: _HasImageToken, geometry: Geometry) -> Expansion:
    """`expand` of families whose images are nothing but embeddings."""
    return Expansion(np.full(geometry.tokens, family.image_token_id, np.int64), None)


def sequential_positions(
    family: object, token_ids: TokenIds, spans: Sequence[Span], geometries: Sequence[Geometry]
) -> Positions:
    """`positions` of families with one axis [1, tokens], on which image tokens count as text does."""
    return np.arange(len(token_ids), dtype=np.int32)[None], len(token_ids)


def limits(min_pixels: int | None, max_pixels: int | None, lowest: int, highest: int) -> tuple[int, int]:
    """Those given, else the lowest and the highest; a maximum below the lowest wins."""
    if max_pixels is None:
        max_pixels = highest
    if min_pixels is None:
        min_pixels = min(lowest, max_pixels)
    if min_pixels > max_pixels:
        problem = f"min_pixels={min_pixels} is above max_pixels={max_pixels}"
        raise ConfigError(f"{problem}; raise max_pixels or lower min_pixels")
    return min_pixels, max_pixels


def setting(name: str, *files: Mapping[str, Any], default: Any = None) -> Any:
    """The value in the first file that has one."""
    return next((file[name] for file in files if file.get(name)), default)


def check_does(image_processor: Mapping[str, Any], name: str, reason: str) -> None:
    """Refuse a checkpoint whose image processor does not do what is always done here."""
    if not image_processor.get(name, True):
        raise ConfigError(f"the image processor says {name}=false; {reason}")


def vision_and_token(files: Files) -> tuple[VisionConfig, int]:
    """The two parts of config.json that every family with images needs."""
    config = files.config
    if config.vision is None or config.image_token_id is None:
        name = "vision_config" if config.vision is None else "image_token_id (or image_token_index)"
        raise ConfigError(f"config.json has no {name}, so this model takes no pictures")
    return config.vision, config.image_token_id


def check_agreement(file: str, settings: Mapping[str, Any], ours: Mapping[str, int]) -> None:
    """Two files of a checkpoint must agree: images are cut into the patches that the tower takes."""
    for name, here in ours.items():
        if settings.get(name) not in (None, here):
            reason = f"{file} says {name}={settings[name]}, but config.json says {here}"
            raise ConfigError(f"{reason}; the two files do not belong together")


def tower_sides(vision: VisionConfig) -> dict[str, int]:
    """Under the names of image processors."""
    return {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }


def check_aspect_ratio(size: Size) -> None:
    ratio = max(size) / min(size)
    if ratio > MAX_ASPECT_RATIO:
        size_text = f"the picture is {size.width}x{size.height}, an aspect ratio of {ratio:.1f}"
        raise RequestError(f"{size_text}; at most {MAX_ASPECT_RATIO} is allowed", code="image_too_large")


def tag(settings: Mapping[str, Any]) -> bytes:
    return json.dumps(settings, sort_keys=True).encode()


def pixel_settings(image_processor: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all image processors share, as far as the checkpoint sets them."""
    names = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    return {name: image_processor[name] for name in names if name in image_processor}
