"""States of recurrent layers (gated delta net), which have a fixed size instead of one entry per token.

rows   | 0 .. requests - 1     | requests ..              |
       | of running requests   | checkpoints of the prefix |
       |                       | cache: the scheduler's    |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from saccade.checkpoint.config import LinearConfig
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.types import ScheduledWindow, StateCheckpoint


class _State(NamedTuple):
    row: int
    num_computed: int  # tokens it has seen


class RecurrentStates:
    def __init__(
        self, linear: LinearConfig, requests: int, kept: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = (len(linear.layers), requests + kept)
        self.conv = torch.zeros(*rows, linear.channels, linear.kernel - 1, dtype=dtype, device=device)
        shape = (*rows, linear.value_heads, linear.key_dim, linear.value_dim)
        self.recurrent = torch.zeros(shape, dtype=torch.float32, device=device)
        self._states: dict[str, _State] = {}
        self._requests = requests
        self._free = list(range(requests - 1, -1, -1))

    def open(self, request_id: str, state: StateCheckpoint | None = None) -> None:
        """An empty state, or a copy of a checkpoint."""
        assert request_id not in self._states, f"{request_id} has a state already"
        row = self._free.pop()
        for states in (self.conv, self.recurrent):
            states[:, row] = states[:, self._requests + state.row] if state else 0
        self._states[request_id] = _State(row, state.num_tokens if state else 0)

    def close(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free.append(state.row)

    def clear(self) -> None:
        for request_id in list(self._states):
            self.close(request_id)

    def of(self, windows: Sequence[ScheduledWindow]) -> States:
        """For the packed tokens of these windows, in order. Each starts where its request's state ends."""
        ones: list[tuple[int, int]] = []  # (packed token, row) of one-token windows, computed together
        groups: list[WindowGroup] = []
        first = 0
        for window in windows:
            length = window.end - window.start
            row = self._advance(window)
            if length == 1 and not window.checkpoints:
                ones.append((first, row))
            else:
                groups += self._cut(window, first, row)
            first += length
        if ones:
            groups.append(self._group([[token] for token, _ in ones], [row for _, row in ones]))
        return States(self.conv, self.recurrent, groups)

    def _cut(self, window: ScheduledWindow, first: int, row: int) -> Iterator[WindowGroup]:
        """The pieces of a window, in order: each ends where a checkpoint is saved, or at the window's end."""
        done = window.start
        for end, kept in window.checkpoints:
            if end <= window.end:  # the window may have been cut before an image that failed
                yield self._group([list(range(first, first + end - done))], [row], [self._requests + kept])
                first += end - done
                done = end
        if done < window.end:
            yield self._group([list(range(first, first + window.end - done))], [row])

    def _advance(self, window: ScheduledWindow) -> int:
        row, done = self._states[window.request_id]
        assert done == window.start, f"a state after {done} tokens cannot go on at {window.start}"
        self._states[window.request_id] = _State(row, window.end)
        return row

    def _group(self, tokens: list[list[int]], *rows: list[int]) -> WindowGroup:
        """`rows`: of the states and, if given, of their checkpoints."""
        device = self.recurrent.device
        return WindowGroup(*[torch.tensor(values, device=device) for values in (tokens, *rows)])

    def check(self) -> None:
        """Every row for requests is free or belongs to one."""
        rows = [state.row for state in self._states.values()]
        assert sorted([*rows, *self._free]) == list(range(self._requests)), "rows were lost or given twice"
