"""In which order images are decoded, and what they cost.

Owners take turns, so that one with many slow pages delays only itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from saccade.types import Key, MediaItem


def in_turn(items: Iterable[MediaItem], begun: Mapping[Key, tuple[MediaItem, object]]) -> list[MediaItem]:
    """Those that are not begun: an owner's first after the others' first, and so on.

    Those that are count as the first ones of their owners.
    """
    counts = Counter(item.owner for item, _ in begun.values())
    turns = []
    for item in items:
        if item.key not in begun:
            turns.append((counts[item.owner], item))
            counts[item.owner] += 1
    return [item for _, item in sorted(turns, key=lambda turn: turn[0])]


def source_pixels(item: MediaItem) -> int:
    return item.header.size.width * item.header.size.height * item.num_frames


def embeddings_of(item: MediaItem) -> int:
    """Before pruning."""
    cells = item.geometry.cells
    return item.geometry.slots if cells is None else cells.width * cells.height
