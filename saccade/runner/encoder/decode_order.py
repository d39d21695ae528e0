"""The order in which images are decoded, and what they cost.

The client for which least was decoded goes first, then its requests take turns: one with many slow pages
delays only itself. What an image costs is guessed when it begins, by its price, and known when it is done.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace

from saccade.types.media import PIXELS_PER_SECOND, MediaItem

_MAX_CLIENTS = 256


class DecodeTurns:
    """What was decoded for each client lately, in pixels of a plain JPEG."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, float] = OrderedDict()  # the latest last
        self._virtual_time = 0.0  # of the client served last: others save nothing up

    def order(self, items: Iterable[MediaItem], active: Iterable[MediaItem] = ()) -> list[MediaItem]:
        """The items one after the other. `active` ones are the first of their requests."""
        counts = Counter(item.owner for item in active)
        clients: dict[str, list[tuple[int, MediaItem]]] = {}
        for item in items:
            clients.setdefault(item.client, []).append((counts[item.owner], item))
            counts[item.owner] += 1
        heap = [
            (self._used_by(client), number, _in_turn(turns))
            for number, (client, turns) in enumerate(clients.items())
        ]
        heapify(heap)
        ordered = []
        while heap:
            pixels, number, turn = heap[0]
            item = turn.pop()
            ordered.append(item)
            if turn:
                heapreplace(heap, (pixels + item.price, number, turn))
            else:
                heappop(heap)
        return ordered

    def begin(self, item: MediaItem) -> None:
        pixels = self._used_by(item.client)
        self._virtual_time = max(self._virtual_time, pixels)
        self._used[item.client] = pixels + item.price
        self._used.move_to_end(item.client)
        if len(self._used) > _MAX_CLIENTS:
            self._used.popitem(last=False)

    def end(self, item: MediaItem, seconds: float) -> None:
        """It took so much CPU time."""
        if item.client in self._used:
            self._used[item.client] += seconds * PIXELS_PER_SECOND - item.price

    def _used_by(self, client: str) -> float:
        return max(self._used.get(client, 0.0), self._virtual_time)


def _in_turn(turns: list[tuple[int, MediaItem]]) -> list[MediaItem]:
    """The first of each request, then the second of each; the next one last."""
    return [item for _, item in sorted(turns, key=lambda turn: turn[0])][::-1]


def embeddings_of(item: MediaItem) -> int:
    """Before pruning."""
    cells = item.geometry.cells
    return item.geometry.slots if cells is None else cells.width * cells.height
