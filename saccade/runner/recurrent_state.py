"""States of requests in layers that remember a fixed amount instead of every token. Does not choose who runs.

rows   | 0 .. requests - 1 |  requests ..   |
       | of a request, from | kept behind a  |
       | its admission until| prompt's block:|
       | it is forgotten    | the scheduler's|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from saccade.checkpoint.config import LinearConfig
from saccade.models.layers.types import States, WindowGroup
from saccade.types import ScheduledWindow, StateCheckpoint


class _Place(NamedTuple):
    row: int
    computed: int  # tokens the state has seen


class RecurrentStates:
    def __init__(
        self, linear: LinearConfig, requests: int, kept: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, rows = len(linear.layers), requests + kept
        self.past = torch.zeros(layers, rows, linear.channels, linear.kernel - 1, dtype=dtype, device=device)
        self.memory = torch.zeros(
            layers, rows, linear.value_heads, linear.key_dim, linear.value_dim, dtype=torch.float32, device=device
        )
        self._places: dict[str, _Place] = {}
        self._requests = requests
        self._free = list(range(requests - 1, -1, -1))

    def open(self, request_id: str, state: StateCheckpoint | None = None) -> None:
        """A state that has seen nothing, or a copy of one that was kept."""
        assert request_id not in self._places, f"{request_id} has a state already"
        row = self._free.pop()
        for states in (self.past, self.memory):
            states[:, row] = states[:, self._requests + state.row] if state else 0
        self._places[request_id] = _Place(row, state.num_tokens if state else 0)

    def close(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self._free.append(place.row)

    def clear(self) -> None:
        for request_id in list(self._places):
            self.close(request_id)

    def of(self, windows: Sequence[ScheduledWindow]) -> States:
        """For the packed tokens of these windows, in their order. Each must begin where its request's state is."""
        ones: list[tuple[int, int]] = []  # (packed token, row) of windows of one token, which are computed together
        groups: list[WindowGroup] = []
        first = 0
        for work in windows:
            length, row = work.end - work.start, self._advance(work)
            if length == 1 and not work.checkpoints:
                ones.append((first, row))
            else:
                groups += self._cut(work, first, row)
            first += length
        if ones:
            groups.append(self._group([[token] for token, _ in ones], [row for _, row in ones]))
        return States(self.past, self.memory, groups)

    def _cut(self, work: ScheduledWindow, first: int, row: int) -> Iterator[WindowGroup]:
        """A window in pieces, one after the other, each up to a place where its state is kept."""
        done = work.start
        for place, kept in work.checkpoints:
            if place <= work.end:  # it may have been cut before a picture that could not be had
                yield self._group([list(range(first, first + place - done))], [row], [self._requests + kept])
                first, done = first + place - done, place
        if done < work.end:
            yield self._group([list(range(first, first + work.end - done))], [row])

    def _advance(self, work: ScheduledWindow) -> int:
        place = self._places[work.request_id]
        assert place.computed == work.start, f"a state after {place.computed} tokens cannot go on at {work.start}"
        self._places[work.request_id] = place._replace(computed=work.end)
        return place.row

    def _group(self, tokens: list[list[int]], rows: list[int], keep_in: list[int] | None = None) -> WindowGroup:
        device = self.memory.device
        kept = torch.tensor(keep_in, device=device) if keep_in is not None else None
        return WindowGroup(torch.tensor(tokens, device=device), torch.tensor(rows, device=device), kept)

    def check(self) -> None:
        """Every row for requests is free or belongs to one."""
        rows = [place.row for place in self._places.values()]
        assert sorted([*rows, *self._free]) == list(range(self._requests)), "rows were lost or given twice"
