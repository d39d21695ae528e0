"""Gated delta nets of a pass on a CUDA device: their kernels, with the states of its requests.

A decode pass has a state row per token, which is the request's row of the block tables. A prefill pass has
pieces of windows: rows of states, and rows that get a checkpoint after a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from saccade.kernels.gdn.decode import allocate_counters, gdn_decode
from saccade.kernels.gdn.layout import GDNShape, GDNStates, GDNWeights
from saccade.kernels.gdn.prefill import GDNPrefill, PrefillWorkspace
from saccade.kernels.gdn.prefill_plan import max_chunks, plan_chunks
from saccade.models.cuda.decoder import Mixer
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.runner.batch import RequestState
from saccade.runner.cuda.graph_sizes import GRAPH_PIECES
from saccade.runner.cuda.layer_pass import DecodePass, DecoderParts, PrefillPass
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window
from saccade.runner.cuda.staging import Metadata
from saccade.runner.forward import Windows
from saccade.runner.recurrent_state import RecurrentStates
from saccade.types.step import Admission, ScheduledWindow


class DeltaNets:
    layer = GatedDeltaNet
    is_optional = False

    @classmethod
    def of(cls, parts: DecoderParts) -> Self | None:
        net = parts.fused.first(GatedDeltaNet)
        return cls(net, parts.states, parts.max_requests) if net and parts.states else None

    def __init__(self, net: GatedDeltaNet, states: RecurrentStates, max_requests: int) -> None:
        """`net`: any of them, for its shape."""
        linear = net.shape
        self.states = states
        self.shape = GDNShape(
            linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.kernel
        )
        self._counters = allocate_counters(max_requests, self.shape, states.recurrent.device)
        self._workspaces: dict[int, PrefillWorkspace] = {}  # by chunks; smaller passes take a larger one

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

    def decode(self, step: DecodePass) -> Mixer:
        rows = step.metadata.rows

        def mix(projected: Tensor, module: GatedDeltaNet, index: int, out: Tensor | None = None) -> Tensor:
            states = self._states_of(index)
            return gdn_decode(
                projected, rows, self.shape, weights_of(module), states, self._counters, out=out
            )

        return Mixer(mix)

    def prefill(self, step: PrefillPass) -> Mixer:
        parts = step.parts
        tokens = step.sizes.tokens
        plan = plan_chunks(parts.piece_starts, parts.piece_rows, parts.keep, tokens)
        workspace = self._workspace_for(max_chunks(tokens, len(parts.piece_rows)))

        def mix(projected: Tensor, module: GatedDeltaNet, index: int, out: Tensor | None = None) -> Tensor:
            states = self._states_of(index)
            run = GDNPrefill(projected, plan, self.shape, weights_of(module), states, workspace)
            return run(out)

        return Mixer(mix)

    def _states_of(self, index: int) -> GDNStates:
        return GDNStates(self.states.conv[index], self.states.recurrent[index])

    def _workspace_for(self, chunks: int) -> PrefillWorkspace:
        """The largest captured pass comes first. A larger one, which is eager, has its own for a while."""
        largest = max(self._workspaces, default=0)
        if chunks <= largest:
            return self._workspaces[largest]
        dtype = self.states.conv.dtype
        device = self.states.conv.device
        workspace = PrefillWorkspace.allocate(chunks, self.shape, dtype, device)
        if not self._workspaces:
            self._workspaces[chunks] = workspace
        return workspace


def weights_of(net: GatedDeltaNet) -> GDNWeights:
    return GDNWeights(net.conv, net.decay, net.decay_bias, net.norm.weight, net.norm.eps)
