"""The gated MLP of decoder layers."""

from __future__ import annotations

from torch import Tensor

from saccade.models.layers.activation import gate_and_mul
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters


class GatedMLP:
    def __init__(self, params: Parameters, hidden: int, wide: int, *, bias: bool = False) -> None:
        both = {"gate": wide, "up": wide}
        self.gate_up = Linear(params.within("gate_up"), hidden, both, bias=bias)
        self.down = Linear(params.within("down"), wide, hidden, bias=bias)
        self.gelu = False  # by tanh, in place of SiLU

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gate_and_mul(self.gate_up(x), gelu=self.gelu))
