"""QKV projection and RoPE in one launch, where a device has a kernel for it. Knows heads, no layers."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.launch.device import is_hopper, num_sms
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.ops import reference


def qkv_rope(x: Tensor, weight: Tensor, bias: Tensor | None, rotary: Tensor, heads: int) -> Tensor | None:
    """x @ weight.T + bias with RoPE applied to queries and keys: [T, 3, heads, d]; None where two launches are as fast.

    x is [T, K], the weight [3 * heads * d, K]; `rotary` as `vit_elementwise.rotate_pairs` takes it. Columns of queries
    and keys come in another order than the weight's rows, the same for both: `reference.parted_columns`.
    """
    if bias is None or x.dtype == torch.float32 or not _has_kernel(x.device):
        return None
    from saccade.kernels.gemm import hopper_vit_qkv_rope

    rows, inputs = x.shape
    dim = len(weight) // (3 * heads)
    programs = num_sms(x.device)
    if not hopper_vit_qkv_rope.suits(rows, inputs, heads, dim, programs):
        return None
    return hopper_vit_qkv_rope.hopper_qkv_rope(x, weight, bias, rotary, heads, programs)


def _self_test(device: torch.device) -> None:
    """It must compile and agree with the reference, also where tiles are halved and not full."""
    from saccade.kernels.gemm.hopper_vit_qkv_rope import DIM, hopper_qkv_rope

    heads = 16
    outputs = 3 * heads * DIM
    x, weight, bias = (torch.randn(*size, device=device).bfloat16() for size in ((150, 80), (outputs, 80), (outputs,)))
    angles = torch.randn(150, DIM // 2, device=device)
    rotary = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
    qkv = hopper_qkv_rope(0.2 * x, weight, bias, rotary, heads, num_sms(device))
    assert_agree(qkv, reference.qkv_rope(0.2 * x, weight, bias, rotary, heads), 0.05)


_has_kernel = KernelChoice(
    "the Hopper QKV projection with RoPE", is_hopper, _self_test, "projection and RoPE are two launches"
)
