"""Short convolutions of a pass on a CUDA device: their kernels, with the states of its requests."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.gdn.prefill_plan import plan_chunks
from saccade.kernels.gdn.short_convolution import convolution_decode, convolution_prefill
from saccade.models.cuda.decoder import Mixer
from saccade.models.layers.short_convolution import ShortConvolution
from saccade.runner.cuda.layer_pass import DecodePass, PrefillPass
from saccade.runner.cuda.recurrent_layers import RecurrentLayers


class ShortConvolutions(RecurrentLayers):
    layer = ShortConvolution

    def decode(self, step: DecodePass) -> Mixer:
        rows = step.metadata.rows

        def mix(projected: Tensor, module: ShortConvolution, index: int, out: Tensor | None = None) -> Tensor:
            return convolution_decode(projected, rows, module.conv, self.states.conv[index], out)

        return Mixer(mix)

    def prefill(self, step: PrefillPass) -> Mixer:
        parts = step.parts
        plan = plan_chunks(parts.piece_starts, parts.piece_rows, parts.keep, step.sizes.tokens)

        def mix(projected: Tensor, module: ShortConvolution, index: int, out: Tensor | None = None) -> Tensor:
            return convolution_prefill(projected, plan, module.conv, self.states.conv[index], out)

        return Mixer(mix)
