"""Puts videos into a prompt whose pictures are expanded already: tokens, spans, positions, identity. Knows no files."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from saccade.media.hashing import identity
from saccade.processor.families.frame_groups import Stretch, VideoRules, positions
from saccade.processor.video import Groups
from saccade.types import Grid, Key, MediaItem, Span, VideoRun

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class VideoPromptBuilder:
    """A prompt as it grows, from the left to the right."""

    pieces: list[Ids] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    marks: list[Key] = field(default_factory=list)  # one per span, for the prefix cache
    videos: list[VideoRun] = field(default_factory=list)

    @property
    def token_ids(self) -> Ids:
        return np.concatenate(self.pieces)

    def identity(self) -> bytes:
        return identity(self.token_ids, self.spans, self.marks)

    def positions(self, merge: int) -> tuple[npt.NDArray[np.int32], int]:
        return positions(sum(map(len, self.pieces)), self.stretches, merge)

    def add_image(self, span: Span, item: MediaItem) -> None:
        self.spans.append(span)
        self.items.append(item)
        self.stretches.append(Stretch(span, item.geometry.grid))
        self.marks.append(span.key)

    def add_video(self, spans: Sequence[Span], video: Groups, is_side_by_side: bool) -> None:
        self.videos.append(VideoRun(len(self.spans), len(spans), video.frames, video.key))
        self.spans += spans
        self.items += video.items
        grid = video.items[0].geometry.grid
        if is_side_by_side:
            whole = replace(spans[0], length=spans[-1].end - spans[0].start)
            lengths = [span.length for span in spans]
            self.stretches.append(Stretch(whole, Grid(len(spans), grid.h, grid.w), video.step, lengths))
            self.marks += [
                _mark(span.key, int(np.float32(index) * np.float32(video.step))) for index, span in enumerate(spans)
            ]
        else:
            self.stretches += [Stretch(span, grid, lengths=[span.length]) for span in spans]
            self.marks += [span.key for span in spans]


def build_video_prompt(
    token_ids: Ids,  # pictures expanded, one token per video
    images: Sequence[tuple[Span, MediaItem]],
    starts: Sequence[int],  # where the videos stand
    videos: Sequence[Groups],
    rules: VideoRules,
    caption: Callable[[float], Sequence[int]],  # the ids of a time in seconds
) -> VideoPromptBuilder:
    made, done, grown, waiting = VideoPromptBuilder(), 0, 0, list(images)
    for start, video in zip(starts, videos, strict=True):
        while waiting and waiting[0][0].start < start:
            made.add_image(*_moved(waiting.pop(0), grown))
        tokens, offsets = _expanded(video, rules, caption)
        made.pieces += [token_ids[done:start], tokens]
        pairs = zip(offsets, video.items, strict=True)
        spans = [_span(start + grown + at, item) for at, item in pairs]
        made.add_video(spans, video, rules.fence is None)
        done, grown = start + 1, grown + len(tokens) - 1
    made.pieces.append(token_ids[done:])
    for image in waiting:
        made.add_image(*_moved(image, grown))
    return made


def _span(start: int, group: MediaItem) -> Span:
    geometry, cells = group.geometry, group.geometry.cells
    made = None if cells is None else cells.width * cells.height
    return Span(start, geometry.tokens, group.key, geometry.slots, made=made)


def _moved(image: tuple[Span, MediaItem], by: int) -> tuple[Span, MediaItem]:
    span, item = image
    return replace(span, start=span.start + by), item


def _expanded(video: Groups, rules: VideoRules, caption: Callable[[float], Sequence[int]]) -> tuple[Ids, list[int]]:
    """The tokens that stand for a video, and where in them each group's embeddings go."""
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
    """A group's positions depend on its place in the video: what is computed for it may be found again only there."""
    return hashlib.sha256(key + struct.pack("<q", time)).digest()
