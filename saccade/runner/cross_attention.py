"""Which rows of a step look at which pictures, for models that read pictures beside the text. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from saccade.models.layers.types import CrossAttentionRows
from saccade.types import Key, ScheduledWindow, Span


def rows_by_image(
    windows: Sequence[tuple[ScheduledWindow, Sequence[Span]]], embeddings: Mapping[Key, Tensor], device: torch.device
) -> list[CrossAttentionRows]:
    """Rows of all requests that look at the same pictures go together. Rows that see none are left out."""
    rows: dict[tuple[Key, ...], list[int]] = {}
    first = 0  # packed row of the window's start
    for work, spans in windows:
        for start, end, keys in stretches(spans, work.start, work.end):
            rows.setdefault(keys, []).extend(range(first + start - work.start, first + end - work.start))
        first += work.end - work.start
    return [
        CrossAttentionRows(torch.tensor(places, device=device), tuple(embeddings[key] for key in keys))
        for keys, places in rows.items()
    ]


def stretches(spans: Sequence[Span], start: int, end: int) -> Iterator[tuple[int, int, tuple[Key, ...]]]:
    """Cut [start, end) where something comes into sight or goes out of it; the same picture twice counts twice."""
    if not spans or not spans[0].is_cross_attended:  # all of a prompt last, or none
        return
    near = [s for s in spans if s.start < end and start < s.pinned_until]
    cuts = sorted({start, end, *(p for s in near for p in (s.start, s.pinned_until) if start < p < end)})
    for low, high in pairwise(cuts):
        keys = tuple(s.key for s in near if s.start <= low < s.pinned_until)
        if keys:
            yield low, high, keys


def reading(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The spans whose embeddings the window [start, end) needs."""
    return [span for span in spans if span.start < end and start < span.pinned_until]
