"""Layers that keep a state of each request, in a pass on a CUDA device. A kind of them adds its kernels.

A decode pass has a state row per token, which is the request's row of the block tables. A prefill pass has
pieces of windows: rows of states, and rows that get a checkpoint after a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from saccade.runner.batch import RequestState
from saccade.runner.cuda.graph_sizes import GRAPH_PIECES
from saccade.runner.cuda.layer_pass import DecoderParts
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window
from saccade.runner.cuda.staging import Metadata
from saccade.runner.forward import Windows
from saccade.runner.recurrent_state import RecurrentStates
from saccade.types.step import Admission, ScheduledWindow


class RecurrentLayers:
    layer: ClassVar[type]
    is_optional = False

    @classmethod
    def of(cls, parts: DecoderParts) -> Self | None:
        layer: Any = parts.fused.first(cls.layer)
        return cls(layer, parts.states, parts.max_requests) if layer and parts.states else None

    def __init__(self, layer: Any, states: RecurrentStates, max_requests: int) -> None:
        """`layer`: any of them, for its shape."""
        self.states = states

    def open(self, admission: Admission, row: int) -> None:
        self.states.open(admission.request.request_id, admission.state, row)

    def close(self, request_id: str, row: int | None) -> None:
        self.states.close(request_id)

    def clear(self) -> None:
        self.states.clear()

    def begin_decode(self, windows: Windows, rows: Metadata, states: Metadata) -> None:
        for window, _ in windows:
            self.states.advance(window)

    def begin_prefill(self, rows: Window, window: ScheduledWindow, state: RequestState) -> Window:
        self.states.advance(window)
        return rows._replace(pieces=tuple(self.states.pieces(window)))

    def begin_pass(self, windows: Sequence[Window]) -> None:
        """All that its layers read is in the metadata."""

    def sized(self, sizes: PrefillSizes, windows: Sequence[Window] | None) -> PrefillSizes:
        if windows is None:
            return sizes._replace(pieces=GRAPH_PIECES)
        return sizes._replace(pieces=sum(len(window.pieces) for window in windows))
