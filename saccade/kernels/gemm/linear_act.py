"""A product and the activation behind it in one launch, where a device has a kernel for it. Knows shapes, no layers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from saccade.kernels.launch.device import is_hopper, num_sms
from saccade.kernels.launch.self_test import self_test_passes
from saccade.kernels.ops import reference


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, out: Tensor | None = None) -> Tensor | None:
    """act(x @ weight.T + bias): [M, N], in `out` if given; None where two launches are as fast, or no kernel does it.

    x is [M, K], the weight [N, K]. Of "silu_and_mul" it is [2 N, K], the gate's rows first; "quick_gelu" and
    "tanh_gelu" have no gate.
    """
    if x.dtype == torch.float32 or not has_kernel(x.device):
        return None
    from saccade.kernels.gemm import hopper_act as hopper_linear_act

    programs, is_gated = num_sms(x.device), act == "silu_and_mul"
    (rows, inputs), outputs = x.shape, len(weight) // 2 if is_gated else len(weight)
    if not hopper_linear_act.suits(rows, inputs, outputs, is_gated, programs):
        return None
    return hopper_linear_act.hopper_linear_act(x, weight, bias, act, programs, out)


@lru_cache
def has_kernel(device: torch.device) -> bool:
    """Tried out when it is asked for the first time; that must not be recorded."""
    return is_hopper(device) and self_test_passes(lambda: _try(device), "activations have launches of their own")


def _try(device: torch.device) -> None:
    """It must compile and agree with the reference, also where tiles are halved and end early."""
    from saccade.kernels.gemm.hopper_act import hopper_linear_act

    for act in ("quick_gelu", "silu_and_mul"):
        x, weight, some = (torch.randn(*size, device=device).bfloat16() for size in ((150, 80), (288, 80), (288,)))
        bias = some if act == "quick_gelu" else None
        found = hopper_linear_act(0.2 * x, weight, bias, act, num_sms(device))
        torch.testing.assert_close(found, reference.linear_act(0.2 * x, weight, bias, act), atol=0.05, rtol=0.05)
