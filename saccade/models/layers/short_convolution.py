"""Short convolution between two gates: a layer whose state is the last few inputs of the convolution.

before, after, x = inputs(row)      u = before * x      out(after * convolved(u))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.models.layers.forward_types import States
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters


def causal_convolution(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, T, channels] after the state [N, channels, kernel - 1] -> output and next state."""
    inputs = torch.cat((state, x.transpose(1, 2)), dim=-1)
    convolved = F.conv1d(inputs, weight, groups=inputs.shape[1])
    return convolved.transpose(1, 2), inputs[..., inputs.shape[-1] - state.shape[-1] :]


class ShortConvolution:
    gates = None  # no GEMM beside `inputs`

    def __init__(self, params: Parameters, text: TextConfig, linear: LinearConfig) -> None:
        hidden = text.hidden_size
        self.shape = linear
        parts = dict.fromkeys(("before", "after", "x"), hidden)
        self.inputs = Linear(params.within("inputs"), hidden, parts)
        self.conv = params.new("conv.weight", hidden, 1, linear.kernel)
        self.out = Linear(params.within("out"), hidden, hidden)

    def __call__(self, x: Tensor, states: States, index: int) -> Tensor:
        """Packed tokens [T, hidden]; `index` counts layers that keep states."""
        before, after, x = self.inputs(x).chunk(3, dim=-1)
        x = before * x
        mixed = torch.empty_like(x)
        state = states.conv[index]
        for group in states.groups:
            tokens = group.tokens
            mixed[tokens], state[group.rows] = causal_convolution(x[tokens], state[group.rows], self.conv)
            if group.keep_in is not None:
                state[group.keep_in] = state[group.rows]
        return self.out(after * mixed)
