"""Gated delta nets of a pass on a CUDA device: their kernels, with the states of its requests."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.gdn.decode import allocate_counters, gdn_decode
from saccade.kernels.gdn.layout import GDNShape, GDNStates, GDNWeights
from saccade.kernels.gdn.prefill import GDNPrefill, PrefillWorkspace
from saccade.kernels.gdn.prefill_plan import max_chunks, plan_chunks
from saccade.models.cuda.decoder import Mixer
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.runner.cuda.layer_pass import DecodePass, PrefillPass
from saccade.runner.cuda.recurrent_layers import RecurrentLayers
from saccade.runner.recurrent_state import RecurrentStates


class DeltaNets(RecurrentLayers):
    layer = GatedDeltaNet

    def __init__(self, net: GatedDeltaNet, states: RecurrentStates, max_requests: int) -> None:
        super().__init__(net, states, max_requests)
        linear = net.shape
        self.shape = GDNShape(
            linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.kernel
        )
        self._counters = allocate_counters(max_requests, self.shape, states.recurrent.device)
        self._workspaces: dict[int, PrefillWorkspace] = {}  # by chunks; smaller passes take a larger one

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
