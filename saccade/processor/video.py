"""From whatever stands for a video to its frame groups: media items with keys and costs. Decodes no frame of a file.

file or bytes ─► header ─► which frames ─► groups of frames, each with the file's bytes and its frames' times
list of frames ─────────► which frames ─► groups of frames, each with its own frames' bytes
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from saccade.costs import blocks_for
from saccade.errors import RequestError, quoted
from saccade.media.load import Loaded, load_image
from saccade.media.video_probe import VideoInfo, check_video_seconds
from saccade.media.video_sources import File, Video, load_video_source
from saccade.options import MediaPolicy
from saccade.processor.checkpoint import Checkpoint
from saccade.processor.families import VideoRules, video_rules_for
from saccade.processor.families.frame_groups import PixelLimits, Sampling
from saccade.types import BillItem, Geometry, Header, Key, MediaItem, Size, Still, VideoRun, short_key

REQUEST_KEYS = ("fps", "num_frames", "max_frames", "max_video_pixels", "video_pruning")
"""What mm_processor_kwargs may say about videos."""
DEFAULT_VIDEOS = 1
_UNKNOWN_RATE = 24.0  # frames a second of a list that comes without: what the models' own processors assume
_HIGHEST_RATE = 1000  # frames a second that a request may name


class Asked(NamedTuple):
    """What one request wants of its videos, within the deployment's limits."""

    sampling: Sampling
    pixels: PixelLimits
    fps: float | None  # as the request gave it: for a list of frames, the rate they were taken at
    pruning: float  # share of the tokens that goes, of every group but the first


class Groups(NamedTuple):
    """A video, ready for the prompt."""

    items: tuple[MediaItem, ...]  # one per frame group, in order
    times: tuple[float, ...]  # seconds, the middle of each group
    step: float  # rotary positions from group to group
    frames: int
    key: Key


class _Frames(NamedTuple):
    """Frames that were chosen."""

    indices: tuple[int, ...]  # in the whole video
    total: int
    rate: float

    @property
    def sampled_rate(self) -> float:
        return len(self.indices) / self.total * self.rate


def videos_for(checkpoint: Checkpoint, policy: MediaPolicy) -> Videos | None:
    """None for a model that takes no videos."""
    rules = video_rules_for(checkpoint)
    return Videos(rules, policy, checkpoint.fingerprint) if rules else None


class Videos:
    """Resolves videos under one deployment's policy."""

    def __init__(self, rules: VideoRules, policy: MediaPolicy, fingerprint: bytes) -> None:
        self.rules = rules
        self.policy = policy
        self._fingerprint = fingerprint

    @property
    def max_per_prompt(self) -> int:
        return self.policy.limits.get("video", DEFAULT_VIDEOS)  # an operator who only limits pictures means pictures

    @property
    def max_frames(self) -> int:
        return self.policy.video.max_frames or self.rules.max_frames

    def largest(self) -> Geometry | None:
        """The most expensive frame group a request may bring; None when it may bring none."""
        if self.max_per_prompt < 1:
            return None
        return self.rules.largest(self.pixel_limits)

    @property
    def pixel_limits(self) -> PixelLimits:
        """An operator who lowers `max_pixels` means frames too, unless there is a limit for videos."""
        given, images = self.policy.video.max_pixels, self.policy.max_pixels
        if given is None and images is not None and not self.rules.is_total:
            given = min(self.rules.max_pixels, images)
        return self.rules.limits(given)

    def asked(self, given: Mapping[str, Any]) -> Asked:
        """What mm_processor_kwargs say: fewer frames or pixels than the deployment's, never more."""
        limits = self.pixel_limits
        fps, num_frames = given.get("fps"), _whole(given, "num_frames", self.max_frames)
        if fps is not None and not (_is_number(fps) and 0 < fps <= _HIGHEST_RATE):
            raise RequestError(
                f"fps must be a number above 0 and at most {_HIGHEST_RATE}, not {quoted(fps)}",
                param="mm_processor_kwargs.fps",
            )
        if fps is not None and num_frames is not None:
            raise RequestError("give either fps or num_frames, not both", param="mm_processor_kwargs.fps")
        highest = _whole(given, "max_frames", self.max_frames) or self.max_frames
        pixels = _whole(given, "max_video_pixels", limits.max_pixels)
        sampling = Sampling(self.policy.video.fps if fps is None else float(fps), highest, num_frames)
        rate = None if fps is None else float(fps)
        return Asked(sampling, self.rules.limits(pixels) if pixels else limits, rate, self._pruning(given))

    def _pruning(self, given: Mapping[str, Any]) -> float:
        """A request may have more tokens left out than the deployment does, never fewer."""
        minimum = self.policy.video.pruning
        asked = given.get("video_pruning", minimum)
        if not (_is_number(asked) and minimum <= asked < 1):
            raise RequestError(
                f"video_pruning must be a number below 1 and at least {minimum:g}, the share in force here, but "
                f"{quoted(asked)} was given",
                param="mm_processor_kwargs.video_pruning",
            )
        return float(asked)

    def resolve(self, video: Video, asked: Asked, salt: bytes) -> Groups:
        try:
            source = load_video_source(video, self.policy)
            if isinstance(source, File):
                return self._of_file(*source, asked, salt)
            return self._of_list(source, video, asked, salt)
        except RequestError as error:
            raise RequestError(error.message, code=error.code, param=error.param or video.param) from None

    # --- files --------------------------------------------------------------------------------------------------------

    def _of_file(self, data: bytes, video_info: VideoInfo, asked: Asked, salt: bytes) -> Groups:
        if asked.sampling.fps > self.policy.video.fps:
            raise RequestError(
                f"fps is {asked.sampling.fps:g}, but at most {self.policy.video.fps:g} are taken here (video_fps)",
                param="mm_processor_kwargs.fps",
            )
        chosen = self.rules.choose(len(video_info.stamps), video_info.rate, asked.sampling)
        frames = _Frames(tuple(chosen.tolist()), len(video_info.stamps), video_info.rate)
        geometry = self._geometry(video_info.size, len(frames.indices), asked)
        header = Header(video_info.format, video_info.size, video_info.orientation, frames.total, "RGB")
        digest = hashlib.sha256(data).digest()
        items = []
        for group, own in self._decoded(frames.indices, geometry, asked):
            stamps = tuple(video_info.stamps[index] for index in group)
            key = self._key(own, salt, digest, video_info.format.encode(), struct.pack(f"<{len(stamps)}q", *stamps))
            items.append(MediaItem(key, "video", data, header, own, stamps=stamps))
        return self._groups(items, frames)

    # --- lists of frames ----------------------------------------------------------------------------------------------

    def _of_list(self, given: Sequence[Any], video: Video, asked: Asked, salt: bytes) -> Groups:
        """Frames that are not taken are not looked at."""
        frames = self._chosen(len(given), asked)
        loaded = {index: self._still(given[index], video, index) for index in frames.indices}
        size = _common_size(loaded)
        geometry = self._geometry(size, len(frames.indices), asked)
        groups = list(self._decoded(frames.indices, geometry, asked))
        self._check_total(size, [loaded[index] for group, _ in groups for index in group])
        items = []
        for group, own in groups:
            shown = [loaded[index] for index in group]
            stills = tuple(Still(len(frame.data), frame.header) for frame in shown)
            key = self._key(own, salt, *(part for frame in shown for part in _identifying(frame)))
            header = Header("frames", size, 1, len(shown), "RGB")
            items.append(MediaItem(key, "video", b"".join(f.data for f in shown), header, own, stills=stills))
        return self._groups(items, frames)

    def _chosen(self, total: int, asked: Asked) -> _Frames:
        """All of them, unless the request says how many: whoever sends frames has chosen already."""
        if not total:
            raise RequestError("the video has no frames", code="invalid_video")
        rate = asked.fps or _UNKNOWN_RATE
        check_video_seconds(total / rate, self.policy)
        if asked.sampling.num_frames is not None:
            chosen = self.rules.choose(total, rate, asked.sampling)
            return _Frames(tuple(chosen.tolist()), total, rate)
        if total > asked.sampling.max_frames:
            raise RequestError(
                f"the video has {total} frames, and at most {asked.sampling.max_frames} are taken (max_video_frames); "
                "send fewer or say num_frames",
                code="video_too_large",
            )
        return _Frames(tuple(range(total)), total, rate)

    def _still(self, frame: Any, video: Video, index: int) -> Loaded:
        return load_image(frame, self.policy, param=f"{video.param}[{index}]", allow_paths=video.allow_path)

    def _check_total(self, size: Size, frames: Collection[Loaded]) -> None:
        """Compressed frames are pictures: all of them together are held to what a request's pictures are held to.

        A frame that is decoded twice, for its own group and to be compared with, counts twice.
        """
        count = sum(frame.header.format != "rgb" for frame in frames)
        pixels = size.width * size.height * count
        if pixels > self.policy.max_request_pixels:
            raise RequestError(
                f"{count} frames of {size.width}x{size.height} have {pixels} pixels, and at most "
                f"{self.policy.max_request_pixels} are allowed in a request (max_request_pixels)",
                code="video_too_large",
            )

    # --- both ---------------------------------------------------------------------------------------------------------

    def _geometry(self, size: Size, count: int, asked: Asked) -> Geometry:
        """A whole group is in memory at once, so it is held to what one picture may have."""
        geometry = self.rules.geometry(size, count, asked.pixels)
        is_compared = count > self.rules.group and self.rules.pruned(geometry, asked.pruning).cells is not None
        frames = self.rules.group + is_compared
        pixels = size.width * size.height * frames
        if pixels > self.policy.max_image_pixels:
            raise RequestError(
                f"{frames} frames of {size.width}x{size.height} have {pixels} pixels, and at most "
                f"{self.policy.max_image_pixels} are allowed at once (max_image_pixels)",
                code="video_too_large",
            )
        return geometry

    def _grouped(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(indices), self.rules.group):
            yield indices[start : start + self.rules.group]

    def _decoded(
        self, indices: Sequence[int], whole: Geometry, asked: Asked
    ) -> Iterator[tuple[Sequence[int], Geometry]]:
        """The frames that each group needs, and what it costs. A pruned one needs the frame before it too: nothing that
        comes later, so that a video may grow."""
        pruned = self.rules.pruned(whole, asked.pruning)
        before: tuple[int, ...] = ()
        for group in self._grouped(indices):
            yield (*before, *group), pruned if before else whole
            before = (group[-1],) if pruned.cells else ()

    def _key(self, geometry: Geometry, salt: bytes, *what: bytes) -> Key:
        """Equal for equal frames at one size under one model and salt. Fields carry their lengths."""
        return _digest(b"frame group", self.rules.policy_tag(geometry), self._fingerprint, salt, *what)

    def _groups(self, items: Sequence[MediaItem], frames: _Frames) -> Groups:
        same = {item.key: item for item in items}
        middles = [(group[0] / frames.rate + group[-1] / frames.rate) / 2 for group in self._padded(frames.indices)]
        return Groups(
            items=tuple(same[item.key] for item in items),
            times=tuple(middles),
            step=self.rules.step(self.rules.group / frames.sampled_rate),
            frames=len(frames.indices),
            key=_digest(b"video", *(item.key for item in items)),
        )

    def _padded(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        for group in self._grouped(indices):
            yield (*group, *[group[-1]] * (self.rules.group - len(group)))


def video_bill_item(items: Sequence[MediaItem], run: VideoRun, block_size: int) -> BillItem:
    """All groups of a video as one."""
    first, tokens = items[0], sum(item.geometry.tokens for item in items)
    return BillItem(
        kind="video",
        width=first.header.size.width,
        height=first.header.size.height,
        resized_width=first.geometry.resized.width,
        resized_height=first.geometry.resized.height,
        tokens=tokens,
        kv_blocks=blocks_for(tokens, block_size),
        key=short_key(run.key),
        grid=first.geometry.grid._replace(t=len(items)),
        frames=run.frames,
        groups=tuple(short_key(item.key) for item in items),
        pruned=first.geometry.tokens * len(items) - tokens,  # the first group is whole
    )


def split_kwargs(given: Any) -> tuple[Any, dict[str, Any]]:
    """mm_processor_kwargs for pictures and for videos."""
    if not isinstance(given, Mapping):
        return given, {}
    video = {name: given[name] for name in REQUEST_KEYS if given.get(name) is not None}
    return {name: value for name, value in given.items() if name not in REQUEST_KEYS}, video


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(given: Mapping[str, Any], name: str, ceiling: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= ceiling:
        raise RequestError(
            f"{name} must be a whole number from 1 to {ceiling}, the limit in force, but {quoted(value)} was given",
            param=f"mm_processor_kwargs.{name}",
        )
    return value


def _digest(*fields: bytes) -> Key:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def _identifying(frame: Loaded) -> tuple[bytes, ...]:
    return frame.header.format.encode(), struct.pack("<QQ", *frame.header.size), frame.data


def _common_size(frames: Mapping[int, Loaded]) -> Size:
    """By the frames' numbers."""
    (first, frame), *others = frames.items()
    size = frame.header.size
    for other, wrong in others:
        if wrong.header.size != size:
            raise RequestError(
                f"the frames of a video have one size, but frame {first + 1} is {size.width}x{size.height} and frame "
                f"{other + 1} is {wrong.header.size.width}x{wrong.header.size.height}",
                code="invalid_video",
            )
    return size
