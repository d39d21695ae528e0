"""Queries, keys and values with their rotation in one launch, where a device has a kernel for it. Knows no layers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from saccade.kernels.launch.device import is_hopper, num_sms
from saccade.kernels.launch.self_test import self_test_passes
from saccade.kernels.ops import reference


def qkv_rope(x: Tensor, weight: Tensor, bias: Tensor | None, rotary: Tensor, heads: int) -> Tensor | None:
    """x @ weight.T + bias with queries and keys turned: [T, 3, heads, d]; None where two launches are as fast.

    x is [T, K], the weight [3 * heads * d, K]; turns as `vit_steps.rotate_pairs` takes them. Queries and keys come in
    another order than that of the weight's rows, the same for both: `reference.parted_columns`.
    """
    if bias is None or x.dtype == torch.float32 or not has_kernel(x.device):
        return None
    from saccade.kernels.gemm import hopper_qkv_rope as hopper_qkv_rope

    (rows, inputs), dim, programs = x.shape, len(weight) // (3 * heads), num_sms(x.device)
    if not hopper_qkv_rope.suits(rows, inputs, heads, dim, programs):
        return None
    return hopper_qkv_rope.hopper_qkv_rope(x, weight, bias, rotary, heads, programs)


@lru_cache
def has_kernel(device: torch.device) -> bool:
    """Tried out when it is asked for the first time; that must not be recorded."""
    return is_hopper(device) and self_test_passes(lambda: _try(device), "heads are turned by launches of their own")


def _try(device: torch.device) -> None:
    """It must compile and agree with the reference, also where tiles are halved and end early."""
    from saccade.kernels.gemm.hopper_qkv_rope import DIM, hopper_qkv_rope

    heads = 16
    outputs = 3 * heads * DIM
    x, weight, bias = (torch.randn(*size, device=device).bfloat16() for size in ((150, 80), (outputs, 80), (outputs,)))
    angles = torch.randn(150, DIM // 2, device=device)
    rotary = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
    found = hopper_qkv_rope(0.2 * x, weight, bias, rotary, heads, num_sms(device))
    torch.testing.assert_close(found, reference.qkv_rope(0.2 * x, weight, bias, rotary, heads), atol=0.05, rtol=0.05)
