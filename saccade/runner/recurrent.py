"""States of requests in layers that remember a fixed amount instead of every token. Does not choose who runs.

A row belongs to a request from its admission until it is forgotten, so there are as many as requests may run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from saccade.config import LinearConfig
from saccade.models.interface import States, WindowGroup
from saccade.types import Work


class _Place(NamedTuple):
    row: int
    computed: int  # tokens the state has seen


class RecurrentStates:
    def __init__(self, linear: LinearConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        layers = len(linear.layers)
        self.past = torch.zeros(layers, rows, linear.channels, linear.kernel - 1, dtype=dtype, device=device)
        self.memory = torch.zeros(
            layers, rows, linear.value_heads, linear.key_dim, linear.value_dim, dtype=torch.float32, device=device
        )
        self._places: dict[str, _Place] = {}
        self._free = list(range(rows - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        return self.memory.shape[1]

    def open(self, request_id: str) -> None:
        """A state that has seen nothing."""
        assert request_id not in self._places, f"{request_id} has a state already"
        row = self._free.pop()
        self.past[:, row] = 0
        self.memory[:, row] = 0
        self._places[request_id] = _Place(row, 0)

    def close(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self._free.append(place.row)

    def clear(self) -> None:
        for request_id in list(self._places):
            self.close(request_id)

    def of(self, works: Sequence[Work]) -> States:
        """For the packed tokens of these windows, in their order. Each must begin where its request's state is."""
        ones: list[tuple[int, int]] = []  # (packed token, row) of windows of one token, which are computed together
        groups: list[WindowGroup] = []
        first = 0
        for work in works:
            length, row = work.end - work.start, self._advance(work)
            if length == 1:
                ones.append((first, row))
            else:
                groups.append(self._group([list(range(first, first + length))], [row]))
            first += length
        if ones:
            groups.append(self._group([[token] for token, _ in ones], [row for _, row in ones]))
        return States(self.past, self.memory, groups)

    def _advance(self, work: Work) -> int:
        place = self._places[work.request_id]
        assert place.computed == work.start, f"a state after {place.computed} tokens cannot go on at {work.start}"
        self._places[work.request_id] = place._replace(computed=work.end)
        return place.row

    def _group(self, tokens: list[list[int]], rows: list[int]) -> WindowGroup:
        device = self.memory.device
        return WindowGroup(torch.tensor(tokens, device=device), torch.tensor(rows, device=device))

    def check(self) -> None:
        """Every row is free or belongs to one request."""
        rows = [place.row for place in self._places.values()]
        assert sorted([*rows, *self._free]) == list(range(self.num_rows)), "rows were lost or given twice"
