"""Gated delta nets of a pass on a CUDA device: their kernels, with the states of its requests.

A decode pass has a state row per token, which is the request's row of the block tables. A prefill pass has
pieces of windows: rows of states, and rows that get a checkpoint after a piece.
"""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.gdn.decode import allocate_counters, gdn_decode
from saccade.kernels.gdn.layout import GDNShape, GDNStates, GDNWeights
from saccade.kernels.gdn.prefill import GDNPrefill, PrefillWorkspace
from saccade.kernels.gdn.prefill_plan import max_chunks, plan_chunks
from saccade.models.cuda.decoder import Mixing
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.runner.recurrent_state import RecurrentStates


class DeltaNets:
    def __init__(self, net: GatedDeltaNet, states: RecurrentStates, max_requests: int) -> None:
        linear = net.shape
        self.states = states
        self.shape = GDNShape(
            linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.kernel
        )
        self._counters = allocate_counters(max_requests, self.shape, states.recurrent.device)
        self._workspaces: dict[int, PrefillWorkspace] = {}  # by chunks; smaller passes take a larger one

    def decode(self, rows: Tensor) -> Mixing:
        """`rows`: int32 [T], of the states."""

        def mix(projected: Tensor, own: GatedDeltaNet, index: int, out: Tensor | None = None) -> Tensor:
            states = self._states_of(index)
            return gdn_decode(projected, rows, self.shape, weights_of(own), states, self._counters, out=out)

        return mix

    def prefill(self, starts: Tensor, rows: Tensor, keep: Tensor, tokens: int) -> Mixing:
        """`starts`, int32 [pieces + 1], `rows` and `keep`, int32 [pieces], as `plan_chunks` takes them."""
        plan = plan_chunks(starts, rows, keep, tokens)
        workspace = self._workspace_for(max_chunks(tokens, len(rows)))

        def mix(projected: Tensor, own: GatedDeltaNet, index: int, out: Tensor | None = None) -> Tensor:
            states = self._states_of(index)
            run = GDNPrefill(projected, plan, self.shape, weights_of(own), states, workspace)
            return run(out)

        return mix

    def _states_of(self, index: int) -> GDNStates:
        return GDNStates(self.states.conv[index], self.states.recurrent[index])

    def _workspace_for(self, chunks: int) -> PrefillWorkspace:
        """The largest captured pass comes first. A larger one, which is eager, has its own for a while."""
        largest = max(self._workspaces, default=0)
        if chunks <= largest:
            return self._workspaces[largest]
        dtype = self.states.conv.dtype
        device = self.states.conv.device
        made = PrefillWorkspace.allocate(chunks, self.shape, dtype, device)
        if not self._workspaces:
            self._workspaces[chunks] = made
        return made


def weights_of(net: GatedDeltaNet) -> GDNWeights:
    return GDNWeights(net.conv, net.decay, net.decay_bias, net.norm.weight, net.norm.eps)
