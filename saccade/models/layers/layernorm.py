"""RMS norm and layer norm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from saccade.models.state_dict import Parameters


class RMSNorm:
    def __init__(self, params: Parameters, size: int, eps: float) -> None:
        self.weight = params.new("weight", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The weight may be float32 where x is not."""
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm:
    def __init__(self, params: Parameters, size: int, eps: float) -> None:
        self.weight = params.new("weight", size)
        self.bias = params.new("bias", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
