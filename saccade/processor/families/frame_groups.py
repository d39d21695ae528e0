"""Video in the Qwen line: which frames are taken, what a frame group costs, where its tokens stand. Pure functions.

A frame group is `group` frames (two) that share their patches; the towers' attention never leaves it. Frame groups are
therefore media items of their own: an old part of a growing video is recognised like a picture that was seen before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.costs import kept_tokens
from saccade.errors import ConfigError
from saccade.processor.families.base import (
    Files,
    check_agreement,
    check_aspect_ratio,
    pixel_settings,
    tag,
    tower_sides,
)
from saccade.processor.families.qwen2_vl import edges_of, fit, largest_fit
from saccade.types import Geometry, Grid, Size, Span

Indices = npt.NDArray[np.int64]


class Sampling(NamedTuple):
    """How many frames are taken of a video."""

    fps: float  # frames a second, where no number is given
    max_frames: int
    num_frames: int | None = None  # just so many


class PixelLimits(NamedTuple):
    """Of a frame; of all frames together where `VideoRules.is_total` says so."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class VideoRules:
    """One checkpoint's rules."""

    token_id: int  # stands for a video in a prompt, and for each of its embeddings
    patch_size: int
    merge_size: int
    group: int  # frames that share patches
    min_pixels: int
    max_pixels: int
    min_frames: int
    max_frames: int
    is_total: bool  # pixel limits hold for all frames together
    frame_tokens: int | None  # bounds a video beside the pixel limits, see `_highest`; None: nothing more does
    tokens_per_second: float | None  # of the time axis; None: it counts frame groups
    fence: tuple[int, int] | None  # tokens around each group, which then has its time in front; None: nothing between
    settings: Mapping[str, Any]

    @property
    def token_side(self) -> int:
        return self.patch_size * self.merge_size

    def limits(self, max_pixels: int | None) -> PixelLimits:
        """What a deployment or a request asks for, else the checkpoint's own."""
        highest = self.max_pixels if max_pixels is None else max_pixels
        return PixelLimits(min(self.min_pixels, highest), highest)

    def choose(self, total: int, rate: float, wanted: Sampling) -> Indices:
        """Which of `total` frames, shown at `rate` a second, are taken."""
        return _up_to_the_last(self, total, rate, wanted) if self.fence else _in_even_steps(self, total, rate, wanted)

    def geometry(self, size: Size, num_frames: int, limits: PixelLimits) -> Geometry:
        """Of one group in a video of so many frames."""
        highest = self._highest(num_frames, limits)
        if self.is_total:
            return self._of(_fit_all(size, max(num_frames, self.group), self.group, self.token_side, limits, highest))
        check_aspect_ratio(size)
        return self._of(fit(size, self.token_side, limits.min_pixels, highest))

    def largest(self, limits: PixelLimits) -> Geometry:
        """At least as many tokens as any group can have."""
        shared = self.group if self.is_total else 1
        lowest, highest = -(-limits.min_pixels // shared), max(limits.max_pixels, int(limits.min_pixels * 1.05))
        return self._of(largest_fit(self.token_side, lowest, highest // shared))

    def pruned(self, geometry: Geometry, pruning: float) -> Geometry:
        """Of a group behind a video's first, of which only the tokens stay where most has changed."""
        kept = kept_tokens(geometry.tokens, pruning)
        if kept == geometry.tokens:
            return geometry
        cells = Size(geometry.grid.w // self.merge_size, geometry.grid.h // self.merge_size)
        return replace(geometry, tokens=kept, slots=kept, cells=cells)

    def policy_tag(self, geometry: Geometry) -> bytes:
        """All that decides which pixels of a group reach the tower, and how much of what it makes of them is kept."""
        sides = {"patch": self.patch_size, "merge": self.merge_size, "group": self.group}
        kept = {} if geometry.cells is None else {"kept": geometry.slots}
        return tag({**self.settings, **sides, "resized": geometry.resized, **kept})

    def step(self, group_seconds: float) -> float:
        """Rotary positions from one group to the next along the time axis."""
        return 1.0 if self.tokens_per_second is None else self.tokens_per_second * group_seconds

    def _highest(self, num_frames: int, limits: PixelLimits) -> int:
        """Newer checkpoints give a frame no more than its share of what all frames may have together."""
        if self.frame_tokens is None:
            return limits.max_pixels
        lowest, bound = int(limits.min_pixels * 1.05), self.frame_tokens * self.token_side**2
        if self.is_total:
            return max(min(bound, limits.max_pixels // num_frames), lowest) * num_frames
        return max(min(limits.max_pixels, int(bound * 0.9) * self.group // num_frames), lowest)

    def _of(self, resized: Size) -> Geometry:
        grid = Grid(1, resized.height // self.patch_size, resized.width // self.patch_size)
        tokens = grid.patches // self.merge_size**2
        return Geometry(resized, grid, tokens, tokens)


# --- from a checkpoint --------------------------------------------------------------------------------------------


def published() -> VideoRules:
    """Of Qwen2-VL as it is on the hub, 2B to 72B: it has no settings of its own for videos."""
    return VideoRules(151656, 14, 2, 2, 56 * 56, 28 * 28 * 16384, 4, 768, False, None, None, None, {})


class _Defaults(NamedTuple):
    """What a video processor assumes when the checkpoint is silent."""

    min_tokens: int
    max_tokens: int
    frame_tokens: int


def qwen2_vl(files: Files) -> VideoRules | None:
    return _rules(files, _Defaults(128, 768, 128_000))


def qwen2_5_vl(files: Files) -> VideoRules | None:
    per_second = files.config.raw["vision_config"].get("tokens_per_second", 4)
    return _rules(files, _Defaults(128, 768, 128_000), tokens_per_second=float(per_second))


def qwen3_vl(files: Files) -> VideoRules | None:
    first, last = (files.config.raw.get(f"vision_{end}_token_id") for end in ("start", "end"))
    if first is None or last is None:
        raise ConfigError("config.json has no vision_start_token_id or vision_end_token_id, which video needs")
    return _rules(files, _Defaults(128, 768, 768), fence=(first, last))


def _rules(
    files: Files,
    silent: _Defaults,
    *,
    tokens_per_second: float | None = None,
    fence: tuple[int, int] | None = None,
) -> VideoRules | None:
    """None for a checkpoint without a token for video."""
    config, given = files.config, files.video_processor or files.image_processor
    if config.video_token_id is None or config.vision is None:
        return None
    check_agreement("the video processor", given, tower_sides(config.vision))
    patch, merge = config.vision.patch_size, config.vision.spatial_merge_size
    size, area = edges_of(given), (patch * merge) ** 2
    _check_same_pixels(files)
    return VideoRules(
        token_id=config.video_token_id,
        patch_size=patch,
        merge_size=merge,
        group=config.vision.temporal_patch_size,
        min_pixels=given.get("min_pixels") or size.get("shortest_edge") or silent.min_tokens * area,
        max_pixels=given.get("max_pixels") or size.get("longest_edge") or silent.max_tokens * area,
        min_frames=given.get("min_frames") or 4,
        max_frames=given.get("max_frames") or 768,
        is_total=fence is not None,
        frame_tokens=given.get("max_video_tokens", silent.frame_tokens) if given.get("cap_pixels_per_frame") else None,
        tokens_per_second=tokens_per_second,
        fence=fence,
        settings=pixel_settings(given),
    )


def _check_same_pixels(files: Files) -> None:
    """The tower's one way of making patches serves both."""
    images, video = pixel_settings(files.image_processor), pixel_settings(files.video_processor)
    differing = sorted(name for name in images.keys() & video.keys() if images[name] != video[name])
    if differing:
        raise ConfigError(
            f"the checkpoint prepares pictures and videos differently ({', '.join(differing)}), which is not supported"
        )


# --- which frames -------------------------------------------------------------------------------------------------


def _in_even_steps(rules: VideoRules, total: int, rate: float, wanted: Sampling) -> Indices:
    """Whole groups, from the first frame on in steps of one length."""
    group = rules.group
    if wanted.num_frames is not None:
        count = min(round(wanted.num_frames / group) * group, wanted.max_frames, total)
    else:
        highest = min(wanted.max_frames, total) // group * group
        count = math.floor(min(max(total / rate * wanted.fps, rules.min_frames), highest))
    count = count // group * group
    if count < 1:
        return np.arange(min(total, 1))  # too short for a group: the one frame fills it
    return _counted(total, count)


def _counted(total: int, count: int) -> Indices:
    """0, step, 2 * step ... below `total`, as the models' own processors count: whole blocks of sixteen numbers in two
    rows of eight, each from a base in single precision, and what is left one by one.

    It matters where a product comes close to a whole number: 2.99999999 is frame 3.
    """
    step = total / count
    numbers = np.arange(math.ceil(total / step))
    lanes = numbers % 8
    bases = ((numbers - lanes) * step).astype(np.float32)
    in_rows = (bases.astype(np.float64) + lanes * step).astype(np.float32)
    one_by_one = (numbers * step).astype(np.float32)
    counted: Indices = np.where(numbers < len(numbers) // 16 * 16, in_rows, one_by_one).astype(np.int64)
    return counted[:count]


def _up_to_the_last(rules: VideoRules, total: int, rate: float, wanted: Sampling) -> Indices:
    """Evenly from the first frame to the last, both included."""
    count = wanted.num_frames
    if count is None:
        count = max(int(total / rate * wanted.fps), rules.min_frames)
    count = max(1, min(count, wanted.max_frames, total))
    return np.linspace(0, total - 1, count).round().astype(np.int64)


# --- how large ----------------------------------------------------------------------------------------------------


def _fit_all(size: Size, frames: int, group: int, side: int, limits: PixelLimits, highest: int) -> Size:
    """As `fit`, with limits for all frames together; a video smaller than a token is enlarged first."""
    width, height = size
    if min(size) < side:
        scale = max(side / height, side / width)
        width, height = int(width * scale), int(height * scale)
    check_aspect_ratio(Size(width, height))
    rounded = Size(round(width / side) * side, round(height / side) * side)
    volume = round(frames / group) * group * rounded.width * rounded.height
    if volume > highest:
        scale = math.sqrt(frames * height * width / highest)
        return Size(*(max(side, math.floor(length / scale / side) * side) for length in (width, height)))
    if volume < limits.min_pixels:
        scale = math.sqrt(limits.min_pixels / (frames * height * width))
        return Size(*(math.ceil(length * scale / side) * side for length in (width, height)))
    return rounded


# --- where --------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """A picture, or the groups of one video that stand side by side: what shares a place in the prompt."""

    span: Span
    grid: Grid  # t counts groups
    step: float = 1.0  # rotary positions from group to group
    lengths: Sequence[int] | None = None  # tokens of each group; None: none is pruned


def positions(length: int, stretches: Sequence[Stretch], merge: int) -> tuple[npt.NDArray[np.int32], int]:
    """Rotary positions [3, length] and that of the first generated token.

    Text behind a video goes on at its longer side, however long the video lasts and however few of its tokens stay.

        text  video of 3 groups of 1 x 2 tokens, step 2    text     answer
    t   0 1   2 2 4 4 6 6                                  4        5
    h   0 1   2 2 2 2 2 2                                  4        5
    w   0 1   2 3 2 3 2 3                                  4        5
    """
    placed = np.empty((3, length), np.int32)
    done, shift = 0, 0  # tokens written; rotary position minus index for the text that comes next
    for stretch in stretches:
        span, grid = stretch.span, stretch.grid
        placed[:, done : span.start] = np.arange(done + shift, span.start + shift)
        first, h, w = span.start + shift, grid.h // merge, grid.w // merge
        inside = _corners(np.indices((grid.t, h, w), dtype=np.int32), stretch.lengths)
        inside[0] = inside[0].astype(np.float32) * np.float32(stretch.step)
        placed[:, span.start : span.end] = inside + first
        done, shift = span.end, first + max(h, w) - span.end
    placed[:, done:] = np.arange(done + shift, length + shift)
    return placed, length + shift


def _corners(inside: npt.NDArray[np.int32], lengths: Sequence[int] | None) -> npt.NDArray[np.int32]:
    """[3, groups, h, w] -> [3, tokens]. Tokens of a pruned group all stand in its upper left corner.

    Which of them stay is known when the frames have been decoded; whoever computes then adds their rows and columns.
    """
    groups = inside.reshape(*inside.shape[:2], -1)
    if lengths is None:
        return groups.reshape(3, -1)
    whole = groups.shape[2]
    parts = [
        own if length == whole else own[:, :1].repeat(length, 1)
        for own, length in zip(groups.swapaxes(0, 1), lengths, strict=True)
    ]
    return np.concatenate(parts, axis=1)
