"""States of recurrent layers (gated delta net), which have a fixed size instead of one entry per token.

rows   | 0 .. requests - 1     | requests             | requests + 1 ..                |
       | of running requests   | for padding tokens   | checkpoints of the prefix      |
       |                       |                      | cache, numbered by scheduler   |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from saccade.checkpoint.config import LinearConfig
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.types.step import ScheduledWindow, StateCheckpoint


class _StateRow(NamedTuple):
    row: int
    num_computed: int  # tokens it has seen


class RecurrentStates:
    def __init__(
        self, linear: LinearConfig, requests: int, checkpoints: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = requests + 1 + checkpoints
        self.conv, self.recurrent, _ = States.zeros(linear, rows, dtype, device)
        self._states: dict[str, _StateRow] = {}
        self._requests = requests
        self._first_checkpoint = requests + 1
        self._free = list(range(requests - 1, -1, -1))

    def open(self, request_id: str, state: StateCheckpoint | None = None, row: int | None = None) -> None:
        """An empty state, or a copy of a checkpoint. `row`: where the caller wants it."""
        assert request_id not in self._states, f"{request_id} has a state already"
        if row is None:
            row = self._free.pop()
        else:
            self._free.remove(row)
        for states in (self.conv, self.recurrent):
            states[:, row] = states[:, self._first_checkpoint + state.row] if state else 0
        self._states[request_id] = _StateRow(row, state.num_tokens if state else 0)

    def close(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free.append(state.row)

    def clear(self) -> None:
        for request_id in list(self._states):
            self.close(request_id)

    def of(self, windows: Sequence[ScheduledWindow]) -> States:
        """The states for packed tokens of these windows. Each starts where its request's state ends."""
        ones: list[tuple[int, int]] = []  # (packed token, row) of one-token windows, computed together
        groups: list[WindowGroup] = []
        first = 0
        for window in windows:
            length = window.end - window.start
            row = self.advance(window)
            if length == 1 and not window.checkpoints:
                ones.append((first, row))
            else:
                groups += self._cut(window, first, row)
            first += length
        if ones:
            groups.append(self._group([[token] for token, _ in ones], [row for _, row in ones]))
        return States(self.conv, self.recurrent, groups)

    def _cut(self, window: ScheduledWindow, first: int, row: int) -> Iterator[WindowGroup]:
        for length, checkpoint in self.pieces(window):
            rows = [[row]] if checkpoint < 0 else [[row], [checkpoint]]
            yield self._group([list(range(first, first + length))], *rows)
            first += length

    def pieces(self, window: ScheduledWindow) -> Iterator[tuple[int, int]]:
        """The pieces of a window, in order: tokens, and the row that gets the state after them, or -1."""
        start = window.start
        for end, checkpoint in window.checkpoints:
            if end <= window.end:  # the window may have been cut before an image that failed
                yield end - start, self._first_checkpoint + checkpoint
                start = end
        if start < window.end:
            yield window.end - start, -1

    def advance(self, window: ScheduledWindow) -> int:
        """Count a window's tokens; returns the row of the state."""
        row, num_computed = self._states[window.request_id]
        place = f"a state after {num_computed} tokens cannot go on at {window.start}"
        assert num_computed == window.start, place
        self._states[window.request_id] = _StateRow(row, window.end)
        return row

    def _group(self, tokens: list[list[int]], *rows: list[int]) -> WindowGroup:
        """`rows`: of the states and, if given, of their checkpoints."""
        device = self.recurrent.device
        return WindowGroup(*[torch.tensor(values, device=device) for values in (tokens, *rows)])

    def check(self) -> None:
        """Every row for requests is free or belongs to one."""
        rows = [state.row for state in self._states.values()]
        assert sorted([*rows, *self._free]) == list(range(self._requests)), "rows were lost or given twice"
