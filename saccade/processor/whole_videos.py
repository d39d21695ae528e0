"""Videos of a model that runs through Transformers' code: each is one item, as a picture is. Decodes no file.

Its own processor says which frames it takes, and what it makes of them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from saccade.errors import RequestError
from saccade.media.hashing import digest_of
from saccade.media.load import Loaded, load_image
from saccade.media.video_probe import check_video_seconds
from saccade.media.video_sources import File, Video, load_video_source
from saccade.options.engine import MediaPolicy
from saccade.processor.checkpoint_files import Checkpoint
from saccade.processor.families import video_rules_for
from saccade.processor.families.fallback import Fallback
from saccade.processor.families.fallback_videos import FallbackVideos
from saccade.processor.images import Images, whole_number
from saccade.processor.video import (
    DEFAULT_VIDEOS,
    UNKNOWN_RATE,
    Videos,
    asked_frames,
    check_fps,
    check_pixels,
    common_size,
    identifying,
    item_of_stills,
    passes,
)
from saccade.types.media import Clip, Geometry, Header, Key, MediaItem, Size

_MAX_FRAMES = 768  # of one video: all of them go through the tower together
_NOT_CHOSEN = ("max_video_pixels", "video_pruning")


class FrameChoice(NamedTuple):
    """What a request says of the frames of its videos."""

    choice: Mapping[str, Any]  # fps or num_frames, for the model's own processor; neither: it chooses
    fps: float | None  # of a list of frames: their own rate
    max_frames: int


class WholeVideos:
    """Resolves videos under one deployment's policy."""

    def __init__(self, rules: FallbackVideos, policy: MediaPolicy, checkpoint: Checkpoint) -> None:
        self.rules = rules
        self.policy = policy
        self._fingerprint = checkpoint.fingerprint
        self._context = min(filter(None, (checkpoint.config.text.max_context, policy.max_model_len)))

    @property
    def token_id(self) -> int:
        """The placeholder of a video."""
        return self.rules.token_id

    @property
    def max_per_prompt(self) -> int:
        return self.policy.limits.get("video", DEFAULT_VIDEOS)

    @property
    def max_frames(self) -> int:
        return self.policy.video.max_frames or _MAX_FRAMES

    def largest(self) -> Geometry | None:
        """The most expensive common video a request may contain; None when it may contain none."""
        if self.max_per_prompt < 1:
            return None
        video = self.policy.video
        return self.rules.largest(video.fps, video.max_seconds, self.max_frames, self._context)

    def options(self, kwargs: Mapping[str, Any]) -> FrameChoice:
        for name in _NOT_CHOSEN:
            if kwargs.get(name):
                message = f"{name} must be left out: the model's own processor sizes its videos"
                raise RequestError(message, param=f"mm_processor_kwargs.{name}")
        fps, num_frames = asked_frames(kwargs, self.max_frames)
        choice = {"fps": fps} if fps is not None else {"num_frames": num_frames} if num_frames else {}
        return FrameChoice(choice, fps, whole_number(kwargs, "max_frames", self.max_frames, self.max_frames))

    def resolve(self, video: Video, options: FrameChoice, salt: bytes) -> MediaItem:
        try:
            source = load_video_source(video, self.policy)
            if isinstance(source, File):
                return self._of_file(source, options, salt)
            return self._of_list(source, video, options, salt)
        except RequestError as error:
            raise error.about(video.param) from None

    def _of_file(self, file: File, options: FrameChoice, salt: bytes) -> MediaItem:
        info = file.video_info
        check_fps(options.choice.get("fps", 0.0), self.policy)
        clip = self.rules.clip(info.size, len(info.stamps), info.rate, options.choice, self.policy.video.fps)
        geometry = self._geometry(info.size, clip, options)
        stamps = tuple(info.stamps[index] for index in clip.indices)
        digest = hashlib.sha256(file.data).digest()
        key = self._key(clip, salt, digest, info.format.encode(), struct.pack(f"<{len(stamps)}q", *stamps))
        work = passes(info, clip.indices)
        header = Header(info.format, info.size, info.orientation, clip.total, "RGB", work)
        return MediaItem(key, "video", file.data, header, geometry, stamps=stamps)

    def _of_list(self, images: Sequence[Any], video: Video, options: FrameChoice, salt: bytes) -> MediaItem:
        """All frames unless the request says num_frames: a list of frames is sampled already."""
        total = len(images)
        if not total:
            raise RequestError("the video has no frames", code="invalid_video")
        rate = options.fps or UNKNOWN_RATE
        check_video_seconds(total / rate, self.policy)
        indices = tuple(range(total))
        first = self._frame(images, 0, video)
        if "num_frames" in options.choice:
            indices = self.rules.clip(first.header.size, total, rate, options.choice, rate).indices
        clip = Clip(total, options.fps, indices, options.fps)
        self._check_frames(first.header.size, clip, options)
        frames = {index: self._frame(images, index, video) for index in indices}
        geometry = self._geometry(common_size(frames), clip, options)
        members = [frames[index] for index in indices]
        key = self._key(clip, salt, *(part for frame in members for part in identifying(frame)))
        return item_of_stills(key, members, geometry)

    def _frame(self, images: Sequence[Any], index: int, video: Video) -> Loaded:
        param = f"{video.param}[{index}]"
        return load_image(images[index], self.policy, param=param, allow_paths=video.allow_path)

    def _geometry(self, size: Size, clip: Clip, options: FrameChoice) -> Geometry:
        self._check_frames(size, clip, options)
        return self.rules.geometry(size, clip)

    def _check_frames(self, size: Size, clip: Clip, options: FrameChoice) -> None:
        """All frames are in memory at once, so the limit of a request's pixels applies to them."""
        count = len(clip.indices)
        if count > options.max_frames:
            limit = f"at most {options.max_frames} are allowed (max_video_frames)"
            message = f"{count} frames of the video would be taken, and {limit}"
            remedy = "send a shorter one, or say fps or num_frames"
            raise RequestError(f"{message}; {remedy}", code="video_too_large")
        check_pixels(size, count, self.policy.max_request_pixels, "in a request (max_request_pixels)")

    def _key(self, clip: Clip, salt: bytes, *what: bytes) -> Key:
        """The content key: equal for equal frames that the model sees in one way."""
        settings = self.rules.settings.encode()
        return digest_of(b"video", settings, repr(clip).encode(), self._fingerprint, salt, *what)


def videos_for(checkpoint: Checkpoint, policy: MediaPolicy, images: Images) -> Videos | WholeVideos | None:
    """None for a model without video."""
    if isinstance(images.family, Fallback):
        rules = images.family.videos
        return None if isinstance(rules, str) else WholeVideos(rules, policy, checkpoint)
    groups = video_rules_for(checkpoint)
    return Videos(groups, policy, checkpoint.fingerprint) if groups else None


def largest_item(images: Images, videos: Videos | WholeVideos | None) -> Geometry | None:
    """The most expensive image, frame group or video the limits allow; None when they allow none."""
    sizes = (images.largest(), videos.largest() if videos else None)
    return max((size for size in sizes if size), key=lambda size: size.slots, default=None)
