"""Video of the Qwen families: frame sampling, geometry and M-RoPE positions. Pure functions.

A frame group is `group` frames (two) that share patches (temporal_patch_size). The tower's attention stays
inside a group, so each group is a media item with a content key of its own, and a growing video reuses its
old groups.
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
from saccade.processor.families import base
from saccade.processor.families.base import Files, Positions
from saccade.processor.families.qwen2_vl import fit, largest_fit, pixel_limits
from saccade.types.media import Geometry, Grid, Size
from saccade.types.prompt import Span

_MIN_TOKENS = 128  # of a video, what the Hugging Face processor assumes when a checkpoint is silent
_MAX_TOKENS = 768

Indices = npt.NDArray[np.int64]


class Sampling(NamedTuple):
    """How many frames of a video are sampled."""

    fps: float
    max_frames: int
    num_frames: int | None = None  # instead of fps


class PixelLimits(NamedTuple):
    """Per frame, or for all frames together if `VideoRules.is_total`."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class VideoRules:
    token_id: int  # placeholder of a video, and of each of its embeddings
    patch_size: int
    merge_size: int
    group: int  # frames that share patches
    min_pixels: int
    max_pixels: int
    min_frames: int
    max_frames: int
    is_total: bool  # pixel limits are for all frames together
    frame_tokens: int | None  # a second bound on a frame, see `_highest`; None: there is none
    tokens_per_second: float | None  # of the time axis; None: it counts frame groups
    fence: tuple[int, int] | None  # tokens around each group, after its timestamp; None: neither
    settings: Mapping[str, Any]

    @property
    def token_side(self) -> int:
        return self.patch_size * self.merge_size

    def limits(self, max_pixels: int | None) -> PixelLimits:
        """The limit of a deployment or request, else the checkpoint's."""
        return PixelLimits(*base.limits(None, max_pixels, self.min_pixels, self.max_pixels))

    def choose(self, total: int, rate: float, sampling: Sampling) -> Indices:
        """Sampled indices of `total` frames at `rate` frames a second."""
        choose = _first_to_last if self.fence else _even_steps
        return choose(self, total, rate, sampling)

    def geometry(self, size: Size, num_frames: int, limits: PixelLimits) -> Geometry:
        """Geometry of one group in a video of so many frames."""
        highest = self._highest(num_frames, limits)
        frames = group = 1  # that the limits are for
        if self.is_total:
            size = _enlarged(size, self.token_side)
            frames = max(num_frames, self.group)
            group = self.group
        base.check_aspect_ratio(size)
        side = self.token_side
        return self._of(fit(size, side, limits.min_pixels, highest, frames=frames, group=group))

    def largest(self, limits: PixelLimits) -> Geometry:
        """A geometry with at least as many tokens as any group can have."""
        shared = self.group if self.is_total else 1
        lowest = -(-limits.min_pixels // shared)
        highest = max(limits.max_pixels, int(limits.min_pixels * 1.05))
        return self._of(largest_fit(self.token_side, lowest, highest // shared))

    def pruned(self, geometry: Geometry, pruning: float) -> Geometry:
        """Geometry of a later group, which keeps only the tokens that changed most since the previous one."""
        tokens = kept_tokens(geometry.tokens, pruning)
        if tokens == geometry.tokens:
            return geometry
        cells = Size(geometry.grid.w // self.merge_size, geometry.grid.h // self.merge_size)
        return replace(geometry, tokens=tokens, slots=tokens, cells=cells)

    def policy_tag(self, geometry: Geometry) -> bytes:
        """Every setting that decides the tower's pixels and how many embeddings stay, for the key."""
        sides = {"patch": self.patch_size, "merge": self.merge_size, "group": self.group}
        pruning = {} if geometry.cells is None else {"kept": geometry.slots}
        return base.tag({**self.settings, **sides, "resized": geometry.resized, **pruning})

    def step(self, group_seconds: float) -> float:
        """RoPE positions from one group to the next along the time axis."""
        return 1.0 if self.tokens_per_second is None else self.tokens_per_second * group_seconds

    def _highest(self, num_frames: int, limits: PixelLimits) -> int:
        """The maximum of pixels. With cap_pixels_per_frame a frame gets at most its share of the total."""
        if self.frame_tokens is None:
            return limits.max_pixels
        lowest = int(limits.min_pixels * 1.05)
        bound = self.frame_tokens * self.token_side**2
        if self.is_total:
            return max(min(bound, limits.max_pixels // num_frames), lowest) * num_frames
        return max(min(limits.max_pixels, int(bound * 0.9) * self.group // num_frames), lowest)

    def _of(self, resized: Size) -> Geometry:
        grid = Grid(1, resized.height // self.patch_size, resized.width // self.patch_size)
        tokens = grid.patches // self.merge_size**2
        return Geometry(resized, grid, tokens, tokens)


def published() -> VideoRules:
    """Qwen2-VL on the hub, 2B to 72B, which has no video settings of its own."""
    return VideoRules(
        token_id=151656,
        patch_size=14,
        merge_size=2,
        group=2,
        min_pixels=56 * 56,
        max_pixels=28 * 28 * 16384,
        min_frames=4,
        max_frames=768,
        is_total=False,
        frame_tokens=None,
        tokens_per_second=None,
        fence=None,
        settings={},
    )


def qwen2_vl(files: Files) -> VideoRules | None:
    return _rules(files, 128_000)


def qwen2_5_vl(files: Files) -> VideoRules | None:
    per_second = files.config.raw["vision_config"].get("tokens_per_second", 4)
    return _rules(files, 128_000, per_second=float(per_second))


def qwen3_vl(files: Files) -> VideoRules | None:
    first = files.config.raw.get("vision_start_token_id")
    last = files.config.raw.get("vision_end_token_id")
    if first is None or last is None:
        message = "config.json has no vision_start_token_id or vision_end_token_id, which video needs"
        raise ConfigError(message)
    return _rules(files, 768, fence=(first, last))


def _rules(
    files: Files, frame_tokens: int, *, per_second: float | None = None, fence: tuple[int, int] | None = None
) -> VideoRules | None:
    """None for a checkpoint without a video token. `frame_tokens` is the Hugging Face processor's default."""
    config = files.config
    processor = files.video_processor or files.image_processor
    if config.video_token_id is None or config.vision is None:
        return None
    base.check_agreement("the video processor", processor, base.tower_sides(config.vision))
    patch = config.vision.patch_size
    merge = config.vision.spatial_merge_size
    area = (patch * merge) ** 2
    min_pixels, max_pixels = pixel_limits(processor, _MIN_TOKENS * area, _MAX_TOKENS * area)
    capped = processor.get("max_video_tokens", frame_tokens)
    _check_same_pixels(files)
    return VideoRules(
        token_id=config.video_token_id,
        patch_size=patch,
        merge_size=merge,
        group=config.vision.temporal_patch_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        min_frames=base.setting("min_frames", processor, default=4),
        max_frames=base.setting("max_frames", processor, default=768),
        is_total=fence is not None,
        frame_tokens=capped if processor.get("cap_pixels_per_frame") else None,
        tokens_per_second=per_second,
        fence=fence,
        settings=base.pixel_settings(processor),
    )


def _check_same_pixels(files: Files) -> None:
    """The tower preprocesses images and videos in the same way."""
    images = base.pixel_settings(files.image_processor)
    video = base.pixel_settings(files.video_processor)
    names = ", ".join(sorted(name for name in images.keys() & video.keys() if images[name] != video[name]))
    if names:
        reason = f"the checkpoint prepares pictures and videos differently ({names})"
        raise ConfigError(f"{reason}, which is not supported")


def _even_steps(rules: VideoRules, total: int, rate: float, sampling: Sampling) -> Indices:
    """Qwen2-VL's sampling: whole groups, from the first frame on in equal steps."""
    group = rules.group
    if sampling.num_frames is not None:
        count = min(round(sampling.num_frames / group) * group, sampling.max_frames, total)
    else:
        highest = min(sampling.max_frames, total) // group * group
        count = math.floor(min(max(total / rate * sampling.fps, rules.min_frames), highest))
    count = count // group * group
    if count < 1:
        return np.arange(min(total, 1))  # too short for a group: one frame is repeated
    return _counted(total, count)


def _counted(total: int, count: int) -> Indices:
    """0, step, 2 * step ... below `total`, rounded as `torch.arange` in the Hugging Face processor rounds.

    It computes blocks of sixteen as two vectors of eight, each from a float32 base, and the rest one by one.
    That decides where a multiple is close to an integer: 2.99999999 is frame 3.
    """
    step = total / count
    numbers = np.arange(math.ceil(total / step))
    lanes = numbers % 8
    bases = ((numbers - lanes) * step).astype(np.float32)
    vectorized = (bases.astype(np.float64) + lanes * step).astype(np.float32)
    scalar = (numbers * step).astype(np.float32)
    counted: Indices = np.where(numbers < len(numbers) // 16 * 16, vectorized, scalar).astype(np.int64)
    return counted[:count]


def _first_to_last(rules: VideoRules, total: int, rate: float, sampling: Sampling) -> Indices:
    """Qwen3-VL's sampling: evenly from the first frame to the last, both included."""
    count = sampling.num_frames
    if count is None:
        count = max(int(total / rate * sampling.fps), rules.min_frames)
    count = max(1, min(count, sampling.max_frames, total))
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def _enlarged(size: Size, side: int) -> Size:
    """A frame smaller than a token is enlarged before its size is rounded."""
    if min(size) >= side:
        return size
    scale = max(side / size.height, side / size.width)
    return Size(int(size.width * scale), int(size.height * scale))


class MropeSegment(NamedTuple):
    """An image, or all adjacent groups of one video: tokens that share one M-RoPE origin."""

    span: Span
    grid: Grid  # t counts groups
    step: float = 1.0  # RoPE positions from group to group
    lengths: Sequence[int] | None = None  # tokens of each group; None: none is pruned


def positions(length: int, segments: Sequence[MropeSegment], merge: int) -> Positions:
    """RoPE positions [3, length] and that of the first generated token.

    Text after a video continues at its longer spatial side, whatever its length and pruning.

        text  video of 3 groups of 1 x 2 tokens, step 2    text     output
    t   0 1   2 2 4 4 6 6                                  4        5
    h   0 1   2 2 2 2 2 2                                  4        5
    w   0 1   2 3 2 3 2 3                                  4        5
    """
    result = np.empty((3, length), np.int32)
    end = 0  # tokens written
    shift = 0  # RoPE position minus index, for the text that comes next
    for segment in segments:
        span = segment.span
        result[:, end : span.start] = np.arange(end + shift, span.start + shift)
        first = span.start + shift
        h = segment.grid.h // merge
        w = segment.grid.w // merge
        inside = _corners(np.indices((segment.grid.t, h, w), dtype=np.int32), segment.lengths)
        inside[0] = inside[0].astype(np.float32) * np.float32(segment.step)
        result[:, span.start : span.end] = inside + first
        end = span.end
        shift = first + max(h, w) - span.end
    result[:, end:] = np.arange(end + shift, length + shift)
    return result, length + shift


def _corners(inside: npt.NDArray[np.int32], lengths: Sequence[int] | None) -> npt.NDArray[np.int32]:
    """[3, groups, h, w] -> [3, tokens]. Tokens of a pruned group all get its upper left corner.

    Which tokens stay is known only after the frames are decoded; the runner then adds their rows and columns.
    """
    groups = inside.reshape(*inside.shape[:2], -1)
    if lengths is None:
        return groups.reshape(3, -1)
    whole = groups.shape[2]
    parts = [
        group if length == whole else group[:, :1].repeat(length, 1)
        for group, length in zip(groups.swapaxes(0, 1), lengths, strict=True)
    ]
    return np.concatenate(parts, axis=1)
