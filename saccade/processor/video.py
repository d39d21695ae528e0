"""Video inputs: sample, size and hash the frame groups of each video into `MediaItem`s. Decodes no file.

file or bytes ─► header ─► sampled frames ─► groups of frames, each with the file's bytes and its timestamps
list of frames ─────────► sampled frames ─► groups of frames, each with the bytes of its own frames
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from saccade.costs import blocks_for
from saccade.errors import RequestError, is_number_within, quoted
from saccade.media.hashing import digest_of
from saccade.media.load import Loaded, load_image
from saccade.media.video_probe import VideoInfo, check_video_seconds
from saccade.media.video_sources import File, Video, load_video_source
from saccade.options.engine import MediaPolicy
from saccade.processor.families.frame_groups import PixelLimits, Sampling, VideoRules
from saccade.processor.images import bill_item, whole_number
from saccade.types.bill import BillItem
from saccade.types.media import Geometry, Header, Key, MediaItem, Size, Still, short_key
from saccade.types.prompt import VideoRun

REQUEST_KEYS = ("fps", "num_frames", "max_frames", "max_video_pixels", "video_pruning")
"""The keys of mm_processor_kwargs that concern videos."""
DEFAULT_VIDEOS = 1
UNKNOWN_RATE = 24.0  # fps of a list of frames that comes without, as in the Hugging Face processors
_FRAMES_PER_PASS = 4  # a video's frame is decoded in a fourth of the time that a JPEG takes
_HIGHEST_RATE = 1000  # fps that a request may name


class VideoOptions(NamedTuple):
    """One request's settings for its videos, within the deployment's limits."""

    sampling: Sampling
    pixels: PixelLimits
    fps: float | None  # as given; for a list of frames it is their own rate
    pruning: float  # share of tokens dropped from every group but the first


class FrameGroups(NamedTuple):
    """A video, ready for the prompt."""

    items: tuple[MediaItem, ...]  # one per frame group, in order
    times: tuple[float, ...]  # seconds, the middle of each group
    step: float  # RoPE positions from group to group
    frames: int
    key: Key


def passes(info: VideoInfo, group: Sequence[int]) -> int:
    """Passes to decode a group, by frame of it: all since a key frame, if no decoder stands in between."""
    key = bisect_right(info.keys, info.stamps[group[0]])
    first = bisect_left(info.stamps, info.keys[key - 1]) if key else 0
    num_decoded = group[-1] - first + 1
    return max(1, num_decoded // (_FRAMES_PER_PASS * len(group)))


class _SampledFrames(NamedTuple):
    indices: tuple[int, ...]  # in the whole video
    total: int
    rate: float


class Videos:
    """Resolves videos under one deployment's policy."""

    def __init__(self, rules: VideoRules, policy: MediaPolicy, fingerprint: bytes) -> None:
        self.rules = rules
        self.policy = policy
        self._fingerprint = fingerprint

    @property
    def max_per_prompt(self) -> int:
        return self.policy.limits.get("video", DEFAULT_VIDEOS)  # a limit on images says nothing about videos

    @property
    def token_id(self) -> int:
        """The placeholder of a video."""
        return self.rules.token_id

    @property
    def max_frames(self) -> int:
        return self.policy.video.max_frames or self.rules.max_frames

    def largest(self) -> Geometry | None:
        """The most expensive frame group a request may contain; None when it may contain none."""
        if self.max_per_prompt < 1:
            return None
        return self.rules.largest(self.pixel_limits)

    @property
    def pixel_limits(self) -> PixelLimits:
        """`max_pixels` limits frames too, unless there is a limit for videos."""
        maximum = self.policy.video.max_pixels
        images = self.policy.max_pixels
        if maximum is None and images is not None and not self.rules.is_total:
            maximum = min(self.rules.max_pixels, images)
        return self.rules.limits(maximum)

    def options(self, kwargs: Mapping[str, Any]) -> VideoOptions:
        """Options from mm_processor_kwargs, which may lower the deployment's limits but not raise them."""
        limits = self.pixel_limits
        fps, num_frames = asked_frames(kwargs, self.max_frames)
        highest = whole_number(kwargs, "max_frames", self.max_frames, self.max_frames)
        pixels = whole_number(kwargs, "max_video_pixels", limits.max_pixels, None)
        if pixels is not None:
            limits = self.rules.limits(pixels)
        sampling = Sampling(self.policy.video.fps if fps is None else fps, highest, num_frames)
        return VideoOptions(sampling, limits, fps, self._pruning(kwargs))

    def _pruning(self, kwargs: Mapping[str, Any]) -> float:
        """A request may prune more tokens than the deployment does, not fewer."""
        minimum = self.policy.video.pruning
        pruning = kwargs.get("video_pruning", minimum)
        if not (is_number_within(pruning) and minimum <= pruning < 1):
            rule = f"video_pruning must be a number below 1 and at least {minimum:g}"
            message = f"{rule}, the share in force here, but {quoted(pruning)} was given"
            raise RequestError(message, param="mm_processor_kwargs.video_pruning")
        return float(pruning)

    def resolve(self, video: Video, options: VideoOptions, salt: bytes) -> FrameGroups:
        try:
            source = load_video_source(video, self.policy)
            if isinstance(source, File):
                return self._of_file(source, options, salt)
            return self._of_list(source, video, options, salt)
        except RequestError as error:
            raise error.about(video.param) from None

    def _of_file(self, file: File, options: VideoOptions, salt: bytes) -> FrameGroups:
        info = file.video_info
        check_fps(options.sampling.fps, self.policy)
        indices = self.rules.choose(len(info.stamps), info.rate, options.sampling)
        frames = _SampledFrames(tuple(indices.tolist()), len(info.stamps), info.rate)
        geometry = self._geometry(info.size, len(frames.indices), options)
        digest = hashlib.sha256(file.data).digest()
        items = []
        for group, cut in self._decoded(frames.indices, geometry, options):
            stamps = tuple(info.stamps[index] for index in group)
            num_passes = passes(info, group)
            header = Header(info.format, info.size, info.orientation, frames.total, "RGB", num_passes)
            key = self._key(cut, salt, digest, info.format.encode(), struct.pack(f"<{len(stamps)}q", *stamps))
            items.append(MediaItem(key, "video", file.data, header, cut, stamps=stamps))
        return self._groups(items, frames)

    def _of_list(
        self, images: Sequence[Any], video: Video, options: VideoOptions, salt: bytes
    ) -> FrameGroups:
        """Only the sampled frames are loaded."""
        frames = self._chosen(len(images), options)
        loaded = {}
        for index in frames.indices:
            param = f"{video.param}[{index}]"
            loaded[index] = load_image(images[index], self.policy, param=param, allow_paths=video.allow_path)
        size = common_size(loaded)
        geometry = self._geometry(size, len(frames.indices), options)
        groups = list(self._decoded(frames.indices, geometry, options))
        self._check_total(size, [loaded[index] for group, _ in groups for index in group])
        items = []
        for group, cut in groups:
            members = [loaded[index] for index in group]
            key = self._key(cut, salt, *(part for frame in members for part in identifying(frame)))
            items.append(item_of_stills(key, members, cut))
        return self._groups(items, frames)

    def _chosen(self, total: int, options: VideoOptions) -> _SampledFrames:
        """All frames unless the request says num_frames: a list of frames is sampled already."""
        if not total:
            raise RequestError("the video has no frames", code="invalid_video")
        rate = options.fps or UNKNOWN_RATE
        check_video_seconds(total / rate, self.policy)
        if options.sampling.num_frames is not None:
            indices = self.rules.choose(total, rate, options.sampling)
            return _SampledFrames(tuple(indices.tolist()), total, rate)
        maximum = options.sampling.max_frames
        if total > maximum:
            count = f"the video has {total} frames, and at most {maximum} are taken (max_video_frames)"
            raise RequestError(f"{count}; send fewer or say num_frames", code="video_too_large")
        return _SampledFrames(tuple(range(total)), total, rate)

    def _check_total(self, size: Size, frames: Collection[Loaded]) -> None:
        """Compressed frames count against max_request_pixels, each as often as it is decoded."""
        count = sum(frame.header.format != "rgb" for frame in frames)
        check_pixels(size, count, self.policy.max_request_pixels, "in a request (max_request_pixels)")

    def _geometry(self, size: Size, count: int, options: VideoOptions) -> Geometry:
        """A whole group is in memory at once, so the limit of one image applies to it."""
        geometry = self.rules.geometry(size, count, options.pixels)
        pruned = self.rules.pruned(geometry, options.pruning)
        is_compared = count > self.rules.group and pruned.cells is not None
        frames = self.rules.group + is_compared
        check_pixels(size, frames, self.policy.max_image_pixels, "at once (max_image_pixels)")
        return geometry

    def _grouped(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(indices), self.rules.group):
            yield indices[start : start + self.rules.group]

    def _decoded(
        self, indices: Sequence[int], whole: Geometry, options: VideoOptions
    ) -> Iterator[tuple[Sequence[int], Geometry]]:
        """Frames and geometry of each group. A pruned one needs the frame before it too, but none later."""
        pruned = self.rules.pruned(whole, options.pruning)
        before: tuple[int, ...] = ()
        for group in self._grouped(indices):
            yield (*before, *group), pruned if before else whole
            before = (group[-1],) if pruned.cells else ()

    def _key(self, geometry: Geometry, salt: bytes, *what: bytes) -> Key:
        """The content key: equal for equal frames at one size under one model and salt."""
        return digest_of(b"frame group", self.rules.policy_tag(geometry), self._fingerprint, salt, *what)

    def _groups(self, items: Sequence[MediaItem], frames: _SampledFrames) -> FrameGroups:
        same = {item.key: item for item in items}
        groups = self._grouped(frames.indices)
        sampled_rate = len(frames.indices) / frames.total * frames.rate
        return FrameGroups(
            items=tuple(same[item.key] for item in items),
            times=tuple((group[0] / frames.rate + group[-1] / frames.rate) / 2 for group in groups),
            step=self.rules.step(self.rules.group / sampled_rate),
            frames=len(frames.indices),
            key=digest_of(b"video", *(item.key for item in items)),
        )


def video_bill_item(items: Sequence[MediaItem], run: VideoRun, block_size: int) -> BillItem:
    """All groups of a video as one item."""
    first = items[0]
    tokens = sum(item.geometry.tokens for item in items)
    return replace(
        bill_item(first, block_size),
        tokens=tokens,
        kv_blocks=blocks_for(tokens, block_size),
        key=short_key(run.key),
        grid=first.geometry.grid._replace(t=len(items)),
        frames=run.frames,
        groups=tuple(short_key(item.key) for item in items),
        pruned=first.geometry.tokens * len(items) - tokens,  # the first group is whole
    )


def asked_frames(kwargs: Mapping[str, Any], highest: int) -> tuple[float | None, int | None]:
    """fps and num_frames of a request's mm_processor_kwargs: one of them, or neither."""
    fps = kwargs.get("fps")
    num_frames = whole_number(kwargs, "num_frames", highest, None)
    if fps is None:
        return None, num_frames
    if not is_number_within(fps, math.ulp(0), _HIGHEST_RATE):
        message = f"fps must be a number above 0 and at most {_HIGHEST_RATE}, not {quoted(fps)}"
        raise RequestError(message, param="mm_processor_kwargs.fps")
    if num_frames is not None:
        raise RequestError("give either fps or num_frames, not both", param="mm_processor_kwargs.fps")
    return float(fps), None


def check_fps(fps: float, policy: MediaPolicy) -> None:
    if fps > policy.video.fps:
        message = f"fps is {fps:g}, but at most {policy.video.fps:g} are taken here (video_fps)"
        raise RequestError(message, param="mm_processor_kwargs.fps")


def split_kwargs(kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """mm_processor_kwargs of images, and those of videos."""
    if not isinstance(kwargs, Mapping):
        return kwargs, {}
    video = {name: kwargs[name] for name in REQUEST_KEYS if kwargs.get(name) is not None}
    return {name: value for name, value in kwargs.items() if name not in REQUEST_KEYS}, video


def check_pixels(size: Size, frames: int, maximum: int, where: str) -> None:
    pixels = size.width * size.height * frames
    if pixels > maximum:
        subject = f"{frames} frames of {size.width}x{size.height} have {pixels} pixels"
        raise RequestError(f"{subject}, and at most {maximum} are allowed {where}", code="video_too_large")


def item_of_stills(key: Key, frames: Sequence[Loaded], geometry: Geometry) -> MediaItem:
    """Of frames of one size that came one by one."""
    stills = tuple(Still(len(frame.data), frame.header) for frame in frames)
    passes = max(frame.header.passes for frame in frames)
    header = Header("frames", frames[0].header.size, 1, len(frames), "RGB", passes)
    data = b"".join(frame.data for frame in frames)
    return MediaItem(key, "video", data, header, geometry, stills=stills)


def identifying(frame: Loaded) -> tuple[bytes, ...]:
    return frame.header.format.encode(), struct.pack("<QQ", *frame.header.size), frame.data


def common_size(frames: Mapping[int, Loaded]) -> Size:
    (first, frame), *tail = frames.items()  # by index
    size = frame.header.size
    for other, frame in tail:
        other_size = frame.header.size
        if other_size != size:
            size_text = f"{size.width}x{size.height}"
            other_text = f"frame {other + 1} is {other_size.width}x{other_size.height}"
            message = (
                f"the frames of a video have one size, but frame {first + 1} is {size_text} and {other_text}"
            )
            raise RequestError(message, code="invalid_video")
    return size
