"""Which rows of a step attend to which images, for models with cross-attention layers. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from saccade.models.layers.forward_types import CrossAttentionRows
from saccade.runner.forward import Embeddings
from saccade.types.media import Key
from saccade.types.prompt import Span
from saccade.types.step import ScheduledWindow


def rows_by_image(
    windows: Sequence[tuple[ScheduledWindow, Sequence[Span]]], embeddings: Embeddings, device: torch.device
) -> list[CrossAttentionRows]:
    """Groups rows of all requests by the images they attend to. Rows that attend to none are left out."""
    rows: dict[tuple[Key, ...], list[int]] = {}
    first = 0  # packed row of the window's start
    for window, spans in windows:
        for start, end, keys in stretches(spans, window.start, window.end):
            rows.setdefault(keys, []).extend(range(first + start - window.start, first + end - window.start))
        first += window.end - window.start
    return [
        CrossAttentionRows(torch.tensor(members, device=device), tuple(embeddings[key] for key in keys))
        for keys, members in rows.items()
    ]


def stretches(spans: Sequence[Span], start: int, end: int) -> Iterator[tuple[int, int, tuple[Key, ...]]]:
    """Cut [start, end) where the set of attended images changes; the same image twice counts twice."""
    if not spans or not spans[0].is_cross_attended:  # all spans of a prompt are, or none
        return
    if spans[0].is_spliced:  # pinned until a range is computed, and read by splicing alone
        return
    near = reading(spans, start, end)
    borders = {p for s in near for p in (s.start, s.pinned_until)}
    cuts = sorted({start, end, *(p for p in borders if start < p < end)})
    for low, high in pairwise(cuts):
        keys = tuple(s.key for s in near if s.start <= low < s.pinned_until)
        if keys:
            yield low, high, keys


def reading(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The spans whose embeddings the window [start, end) needs."""
    return [span for span in spans if span.start < end and start < span.pinned_until]
