"""From whatever stands for a video to its frame groups: media items with keys and costs. Decodes no frame of a file.

file or bytes ─► header ─► which frames ─► groups of frames, each with the file's bytes and its frames' times
list of frames ─────────► which frames ─► groups of frames, each with its own frames' bytes
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.costs import blocks_for
from saccade.options import MediaPolicy
from saccade.processor.checkpoint import Checkpoint
from saccade.processor.clips import Clip, check_video_bytes, check_video_seconds, probe_clip
from saccade.processor.families import VideoRules, video_rules_for
from saccade.processor.families.frame_groups import PixelLimits, Sampling
from saccade.processor.media import Loaded, decode_data_url, load_image
from saccade.types import (
    BillItem,
    Geometry,
    Header,
    Key,
    MediaItem,
    RequestError,
    Size,
    Still,
    VideoRun,
    short_key,
)

REQUEST_KEYS = ("fps", "num_frames", "max_frames", "max_video_pixels")
"""What mm_processor_kwargs may say about videos."""
DEFAULT_VIDEOS = 1
_UNKNOWN_RATE = 24.0  # frames a second of a list that comes without: what the models' own processors assume
_HIGHEST_RATE = 1000  # frames a second that a request may name
_MOST_SENT = 10_000  # frames in one data: URL, of which `num_frames` may be taken


@dataclass(frozen=True, slots=True)
class Video:
    """A video as a caller gave it."""

    source: Any
    param: str  # where it stands in the request, for errors
    allow_path: bool = True  # False for strings that a client sent


class Asked(NamedTuple):
    """What one request wants of its videos, within the deployment's limits."""

    sampling: Sampling
    pixels: PixelLimits
    fps: float | None  # as the request gave it: for a list of frames, the rate they were taken at


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
        given, pictures = self.policy.video.max_pixels, self.policy.max_pixels
        if given is None and pictures is not None and not self.rules.is_total:
            given = min(self.rules.max_pixels, pictures)
        return self.rules.limits(given)

    def asked(self, given: Mapping[str, Any]) -> Asked:
        """What mm_processor_kwargs say: fewer frames or pixels than the deployment's, never more."""
        limits = self.pixel_limits
        fps, num_frames = given.get("fps"), _whole(given, "num_frames", self.max_frames)
        if fps is not None and not (_is_number(fps) and 0 < fps <= _HIGHEST_RATE):
            raise RequestError(
                f"fps must be a number above 0 and at most {_HIGHEST_RATE}, not {fps!r:.80}",
                param="mm_processor_kwargs.fps",
            )
        if fps is not None and num_frames is not None:
            raise RequestError("give either fps or num_frames, not both", param="mm_processor_kwargs.fps")
        highest = _whole(given, "max_frames", self.max_frames) or self.max_frames
        pixels = _whole(given, "max_video_pixels", limits.max_pixels)
        sampling = Sampling(self.policy.video.fps if fps is None else float(fps), highest, num_frames)
        return Asked(sampling, self.rules.limits(pixels) if pixels else limits, None if fps is None else float(fps))

    def resolve(self, video: Video, asked: Asked, salt: bytes) -> Groups:
        try:
            source = _load(video, self.policy)
            if isinstance(source, _File):
                return self._of_file(*source, asked, salt)
            return self._of_list(source, video, asked, salt)
        except RequestError as error:
            raise RequestError(error.message, code=error.code, param=error.param or video.param) from None

    # --- files --------------------------------------------------------------------------------------------------------

    def _of_file(self, data: bytes, clip: Clip, asked: Asked, salt: bytes) -> Groups:
        if asked.sampling.fps > self.policy.video.fps:
            raise RequestError(
                f"fps is {asked.sampling.fps:g}, but at most {self.policy.video.fps:g} are taken here (video_fps)",
                param="mm_processor_kwargs.fps",
            )
        chosen = self.rules.choose(len(clip.stamps), clip.rate, asked.sampling)
        frames = _Frames(tuple(chosen.tolist()), len(clip.stamps), clip.rate)
        geometry = self._geometry(clip.size, len(frames.indices), asked)
        header = Header(clip.format, clip.size, clip.orientation, frames.total, "RGB")
        digest = hashlib.sha256(data).digest()
        items = []
        for group in self._grouped(frames.indices):
            stamps = tuple(clip.stamps[index] for index in group)
            key = self._key(geometry, salt, digest, clip.format.encode(), struct.pack(f"<{len(stamps)}q", *stamps))
            items.append(MediaItem(key, "video", data, header, geometry, stamps=stamps))
        return self._groups(items, frames)

    # --- lists of frames ----------------------------------------------------------------------------------------------

    def _of_list(self, given: Sequence[Any], video: Video, asked: Asked, salt: bytes) -> Groups:
        """Frames that are not taken are not looked at."""
        frames = self._chosen(len(given), asked)
        loaded = {index: self._still(given[index], video, index) for index in frames.indices}
        size = _common_size(loaded)
        self._check_total(size, loaded.values())
        geometry = self._geometry(size, len(frames.indices), asked)
        items = []
        for group in self._grouped(frames.indices):
            own = [loaded[index] for index in group]
            stills = tuple(Still(len(frame.data), frame.header) for frame in own)
            key = self._key(geometry, salt, *(part for frame in own for part in _identifying(frame)))
            header = Header("frames", size, 1, len(own), "RGB")
            items.append(MediaItem(key, "video", b"".join(f.data for f in own), header, geometry, stills=stills))
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
        """Compressed frames are pictures: all of them together are held to what a request's pictures are held to."""
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
        pixels = size.width * size.height * self.rules.group
        if pixels > self.policy.max_image_pixels:
            raise RequestError(
                f"{self.rules.group} frames of {size.width}x{size.height} have {pixels} pixels, and at most "
                f"{self.policy.max_image_pixels} are allowed at once (max_image_pixels)",
                code="video_too_large",
            )
        return self.rules.geometry(size, count, asked.pixels)

    def _grouped(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(indices), self.rules.group):
            yield indices[start : start + self.rules.group]

    def _key(self, geometry: Geometry, salt: bytes, *what: bytes) -> Key:
        """Equal for equal frames at one size under one model and salt. Fields carry their lengths."""
        return _digest(b"frame group", self.rules.policy_tag(geometry.resized), self._fingerprint, salt, *what)

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
            f"{name} must be a whole number from 1 to {ceiling}, the limit in force, but {value!r:.80} was given",
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


# --- loading ------------------------------------------------------------------------------------------------------


class _File(NamedTuple):
    data: bytes
    clip: Clip


def _load(video: Video, policy: MediaPolicy) -> _File | Sequence[Any]:
    """A file with its header, or a list of frames as they were given."""
    source = video.source
    if isinstance(source, (list, tuple)) or (isinstance(source, np.ndarray) and source.ndim == 4):
        return list(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _file(bytes(source), policy)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _from_data_url(source, policy)
    if isinstance(source, (str, Path)) and video.allow_path and "://" not in str(source):
        return _file(_read(source, policy), policy)
    if isinstance(source, str):
        raise RequestError(
            "a video cannot be fetched from there; send it as a data: URL with base64 data", code="invalid_video_url"
        )
    shape = f" of the shape {source.shape}" if isinstance(source, np.ndarray) else ""
    raise RequestError(
        f"a video is a path, bytes, a list of frames, an array [frames, height, width, 3] or a data: URL, not "
        f"{type(source).__name__}{shape}",
        code="invalid_video",
    )


def _file(data: bytes, policy: MediaPolicy) -> _File:
    return _File(data, probe_clip(data, policy))


def _from_data_url(url: str, policy: MediaPolicy) -> _File | list[str]:
    """Bytes of a file; or, of the type video/jpeg, pictures one after the other with commas between them."""
    check_video_bytes(len(url) // 4 * 3, policy)
    head, _, payload = url.partition(",")
    kind = head[5:].split(";")[0].strip().lower()
    if kind in ("video/jpeg", "video/png", "video/webp"):
        _check_sent(payload.count(",") + 1)
        still = head.replace("video/", "image/", 1)
        return [f"{still},{frame}" for frame in payload.split(",")]
    try:
        return _file(decode_data_url(url, replace(policy, max_image_bytes=policy.video.max_bytes)), policy)
    except RequestError as error:
        message = error.message.replace("the picture's", "the video's", 1)
        raise RequestError(message, code=error.code, param=error.param) from None


def _check_sent(count: int) -> None:
    if count > _MOST_SENT:
        raise RequestError(
            f"the video has {count} frames, and at most {_MOST_SENT} may be sent; send fewer", code="video_too_large"
        )


def _read(path: str | Path, policy: MediaPolicy) -> bytes:
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):  # a device or a pipe may never end
            raise OSError(None, "not a regular file")
        check_video_bytes(info.st_size, policy)
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        reason = "not a valid path"
    raise RequestError(f"the video file {os.fspath(path)!r} cannot be read: {reason}", code="invalid_video")
