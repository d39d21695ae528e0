"""Videos of families that run through Transformers' code: frames, tokens and sizes by their own processor.

A video is one item with one span, also where its processor writes times between frames: what a model makes of
those tokens comes from its own forward, as with pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from saccade.checkpoint import hf_video
from saccade.checkpoint.hf_processor import Frame, Placeholder
from saccade.checkpoint.hf_video import VideoForm, VideoRuns, form_of
from saccade.errors import RequestError
from saccade.types.media import Clip, Geometry, Grid, Size

Ints = npt.NDArray[np.int64]
_KEPT = 64  # videos, of which each may have many thousands of tokens
_BLANK_PIXELS = 100_000_000  # of frames that a processor is shown to count their tokens
_LONG = 30.0  # seconds, and frames a second, of the largest that is planned for
_RATE = 24.0
_COMMON = (Size(640, 360), Size(1280, 720))


@dataclass(frozen=True, slots=True)
class FallbackVideos:
    token_id: int  # placeholder in the prompt before expansion
    runs: VideoRuns
    frame: Frame
    patch_dim: int
    count: Callable[[VideoForm], Any]
    is_beside_images: bool  # a prompt may have both
    settings: str  # of the video processor
    absorbed: tuple[int, ...]  # tokens around a placeholder that vanish with it: two or none

    @classmethod
    def of(
        cls,
        processor: Any,
        config: Any,
        image: Placeholder,
        patch_dim: int,
        counted: Callable[[dict[str, Any], Frame], Any],
    ) -> Self:
        """ValueError for videos whose tokens cannot be known before they are decoded."""
        place = hf_video.video_place(processor, config)
        frame = hf_video.video_frame(processor, place)
        runs = VideoRuns(processor, place.written)
        if runs.looks_at_pixels:
            raise ValueError("how many tokens a video takes depends on what it shows")
        return cls(
            processor.tokenizer.convert_tokens_to_ids(place.token),
            runs,
            frame,
            patch_dim,
            lru_cache(_KEPT)(lambda form: counted(runs(form), frame)),
            hf_video.stands_beside(processor, place, image),
            repr(processor.video_processor),
            hf_video.absorbed_ends(processor, place),
        )

    def framed(self, token_ids: Ints, images: int) -> Ints:
        """With what the processor writes around a prompt with videos."""
        places = np.flatnonzero(token_ids == self.token_id)
        videos = len(places)
        if not videos:
            return token_ids
        if images and not self.is_beside_images:
            reason = "its processor writes them in other tokens than each alone"
            raise RequestError(f"this model takes pictures or a video in a prompt, not both: {reason}")
        if videos > 1 and not self.frame.takes_many:
            reason = "its processor writes several in other tokens than each alone"
            raise RequestError(f"this model takes one video per prompt here: {reason}; send one at a time")
        ends = [
            (place - 1, place + 1)
            for place in places.tolist()
            if tuple(token_ids[max(place - 1, 0) : place + 2 : 2].tolist()) == self.absorbed
        ]
        ids = np.delete(token_ids, np.array(ends, np.int64).ravel())
        return np.array(self.frame.around(ids.tolist()), np.int64)

    def clip(self, size: Size, total: int, rate: float, choice: Mapping[str, Any], fps: float) -> Clip:
        """Frames of a file. `fps`: where neither the request nor the processor says which."""
        if not choice and not self.runs.samples:
            choice = {"fps": min(fps, rate)}
        try:
            indices = self.runs.chosen(size, total, rate, choice)
        except Exception:  # a processor may raise anything about a video
            words = "".join(f" with {name}={value:g}" for name, value in choice.items())
            what = f"the video has {total} frames of {size.width}x{size.height} at {rate:g} a second"
            message = f"{what}, of which the model's own processor takes none{words}"
            raise RequestError(message, code="invalid_video") from None
        return Clip(total, rate, tuple(min(index, total - 1) for index in indices), choice.get("fps"))

    def geometry(self, size: Size, clip: Clip) -> Geometry:
        pixels = size.width * size.height * len(clip.indices)
        if pixels > _BLANK_PIXELS and not self.runs.is_cheap:
            what = f"{len(clip.indices)} frames of {size.width}x{size.height} have {pixels} pixels"
            message = f"{what}, and at most {_BLANK_PIXELS} are allowed where they are needed to count tokens"
            raise RequestError(message, code="video_too_large")
        try:
            counted = self.count(form_of(size, clip))
        except Exception as error:
            if isinstance(error, MemoryError) or "memory" in str(error):  # which says nothing of the video
                raise
            what = f"{len(clip.indices)} frames of {size.width}x{size.height} pixels"
            message = f"the model's own processor takes no videos of {what}"
            raise RequestError(message, code="invalid_video") from None
        tokens = len(counted.token_ids)
        return Geometry(size, Grid(1, -(-counted.values // self.patch_dim), 1), tokens, tokens, clip=clip)

    def largest(self, fps: float, longest: float, frames: int, tokens: int) -> Geometry | None:
        """The largest common video that a context of so many tokens holds; another may cost more."""
        geometries = []
        sizes = _COMMON if self.runs.is_cheap else _COMMON[:1]
        for seconds in (1.0, _LONG / 3, _LONG):
            for size in sizes:
                total = max(round(min(seconds, longest) * _RATE), 1)
                with suppress(RequestError):
                    clip = self.clip(size, total, _RATE, {}, fps)
                    if len(clip.indices) <= frames:
                        geometries.append(self.geometry(size, clip))
        fitting = [replace(geometry, clip=None) for geometry in geometries if geometry.tokens <= tokens]
        return max(fitting, key=lambda geometry: geometry.slots, default=None)
