"""GEMM and activation in one launch, where a device has a kernel for it. Knows shapes, no layers."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.launch.device import is_hopper, num_sms
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.ops import reference


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, out: Tensor | None = None) -> Tensor | None:
    """act(x @ weight.T + bias): [M, N], in `out` if given; None where two launches are as fast, or no kernel does it.

    x is [M, K], the weight [N, K]. For "silu_and_mul" and "gelu_and_mul" it is [2 N, K], the gate's rows first;
    "quick_gelu" and "tanh_gelu" have no gate.
    """
    if x.dtype == torch.float32 or not _has_kernel(x.device):
        return None
    from saccade.kernels.gemm import hopper_act  # Gluon is experimental: only where used

    rows, inputs = x.shape
    is_gated = act.endswith("_and_mul")
    outputs = len(weight) // 2 if is_gated else len(weight)
    programs = num_sms(x.device)
    if not hopper_act.suits(rows, inputs, outputs, is_gated, programs):
        return None
    return hopper_act.hopper_linear_act(x, weight, bias, act, programs, out)


def _self_test(device: torch.device) -> None:
    """It must compile and agree with the reference, also where tiles are halved and not full."""
    from saccade.kernels.gemm.hopper_act import hopper_linear_act

    for act in ("quick_gelu", "silu_and_mul"):
        x, weight, biases = (torch.randn(*size, device=device).bfloat16() for size in ((150, 80), (288, 80), (288,)))
        bias = biases if act == "quick_gelu" else None
        rows = hopper_linear_act(0.2 * x, weight, bias, act, num_sms(device))
        assert_agree(rows, reference.linear_act(0.2 * x, weight, bias, act), 0.05)


_has_kernel = KernelChoice(
    "the Hopper GEMM with an activation", is_hopper, _self_test, "GEMM and activation are two launches"
)
