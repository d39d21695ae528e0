"""Video prompt expansion: replaces video placeholders in a prompt whose images are already expanded."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from saccade.media.hashing import identity
from saccade.processor.families.frame_groups import MropeSegment, VideoRules, positions
from saccade.processor.video import FrameGroups
from saccade.types.media import Grid, Key, MediaItem
from saccade.types.prompt import Span, VideoRun

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class VideoPromptBuilder:
    """A prompt under construction, from left to right."""

    pieces: list[Ids] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    segments: list[MropeSegment] = field(default_factory=list)
    marks: list[Key] = field(default_factory=list)  # one per span, for the prefix cache
    videos: list[VideoRun] = field(default_factory=list)

    @property
    def token_ids(self) -> Ids:
        return np.concatenate(self.pieces)

    def identity(self) -> bytes:
        return identity(self.token_ids, self.spans, self.marks)

    def positions(self, merge: int) -> tuple[npt.NDArray[np.int32], int]:
        return positions(sum(map(len, self.pieces)), self.segments, merge)

    def add_image(self, span: Span, item: MediaItem) -> None:
        self.spans.append(span)
        self.items.append(item)
        self.segments.append(MropeSegment(span, item.geometry.grid))
        self.marks.append(span.key)

    def add_video(self, spans: Sequence[Span], video: FrameGroups, is_side_by_side: bool) -> None:
        self.videos.append(VideoRun(len(self.spans), len(spans), video.frames, video.key))
        self.spans += spans
        self.items += video.items
        grid = video.items[0].geometry.grid
        if is_side_by_side:
            whole = replace(spans[0], length=spans[-1].end - spans[0].start)
            lengths = [span.length for span in spans]
            self.segments.append(MropeSegment(whole, Grid(len(spans), grid.h, grid.w), video.step, lengths))
            for index, span in enumerate(spans):
                self.marks.append(_mark(span.key, int(np.float32(index) * np.float32(video.step))))
        else:
            self.segments += [MropeSegment(span, grid, lengths=[span.length]) for span in spans]
            self.marks += [span.key for span in spans]


def build_video_prompt(
    token_ids: Ids,  # images expanded, one token per video
    images: Sequence[tuple[Span, MediaItem]],
    starts: Sequence[int],  # indices of the videos' tokens
    videos: Sequence[FrameGroups],
    rules: VideoRules,
    caption: Callable[[float], Sequence[int]],  # ids of a timestamp
) -> VideoPromptBuilder:
    builder = VideoPromptBuilder()
    queue = list(images)
    position = 0  # ids copied
    grown = 0  # tokens added so far
    for start, video in zip(starts, videos, strict=True):
        while queue and queue[0][0].start < start:
            builder.add_image(*_moved(queue.pop(0), grown))
        tokens, offsets = _expanded(video, rules, caption)
        builder.pieces += [token_ids[position:start], tokens]
        spans = [_span(start + grown + at, item) for at, item in zip(offsets, video.items, strict=True)]
        builder.add_video(spans, video, rules.fence is None)
        position = start + 1
        grown += len(tokens) - 1
    builder.pieces.append(token_ids[position:])
    for image in queue:
        builder.add_image(*_moved(image, grown))
    return builder


def _span(start: int, group: MediaItem) -> Span:
    geometry = group.geometry
    encoder_tokens = None if geometry.cells is None else geometry.cells.width * geometry.cells.height
    return Span(start, geometry.tokens, group.key, geometry.slots, encoder_tokens=encoder_tokens)


def _moved(image: tuple[Span, MediaItem], by: int) -> tuple[Span, MediaItem]:
    span, item = image
    return replace(span, start=span.start + by), item


def _expanded(
    video: FrameGroups, rules: VideoRules, caption: Callable[[float], Sequence[int]]
) -> tuple[Ids, list[int]]:
    """The tokens of a video, and the offset of each group's embeddings in them."""
    tokens: list[int] = []
    offsets = []
    for item, seconds in zip(video.items, video.times, strict=True):
        if rules.fence:
            tokens += [*caption(seconds), rules.fence[0]]
        offsets.append(len(tokens))
        tokens += [rules.token_id] * item.geometry.tokens
        tokens += rules.fence[1:] if rules.fence else ()
    return np.array(tokens, np.int64), offsets


def _mark(key: Key, time: int) -> Key:
    """A prefix-cache key: KV depends on a group's RoPE position in the video, so it matches only there."""
    return hashlib.sha256(key + struct.pack("<q", time)).digest()
