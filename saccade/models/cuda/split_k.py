"""Whether split-K GEMMs in Gluon run on a device: decided once, by small ones that PyTorch checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.launch.device import is_hopper
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.ops import reference
from saccade.kernels.ops.quantize_rows import quantize_rows
from saccade.models.cuda.int4_gemms import random_weight


def _self_test(device: torch.device) -> None:
    from saccade.kernels.gemm.hopper_split_k import (  # Gluon is experimental: only where used
        PipelineConfig,
        split_k_gated_linear,
        split_k_linear,
    )

    x, weight = (torch.randn(rows, 256, device=device, dtype=torch.bfloat16) / 8 for rows in (20, 128))
    expected = F.linear(x.float(), weight.float())
    found = split_k_linear(x, weight, None, PipelineConfig(2, 2)).sum(0)
    assert_agree(found, expected, 1e-3)
    found = split_k_gated_linear(x, weight, PipelineConfig(3)).float()
    assert_agree(found, _gated(expected), 0.02)


def _self_test_fp8(device: torch.device) -> None:
    from saccade.kernels.gemm import hopper_fp8_split_k, hopper_split_k

    weight = (torch.randn(256, 1024, device=device) * 16).to(torch.float8_e4m3fn)
    sizes = ((2, 8), (256, 1))
    blocks, of_rows = ((torch.rand(size, device=device) + 0.5) / 512 for size in sizes)  # sums near 1
    bias = torch.randn(256, device=device, dtype=torch.bfloat16)
    for rows, group, scales in ((20, 128, blocks), (64, 64, blocks), (5, 128, of_rows)):
        x = quantize_rows(torch.randn(rows, 1024, device=device, dtype=torch.bfloat16), group)
        config = hopper_split_k.PipelineConfig(2, 2)
        expected = reference.fp8_split_k_linear(x, weight, scales, bias, config).sum(0)
        assert_agree(
            hopper_fp8_split_k.fp8_split_k_linear(x, weight, scales, bias, config).sum(0), expected, 2e-3
        )
        into = torch.zeros(rows, 384, device=device, dtype=torch.bfloat16)[:, :256]
        assert_agree(
            hopper_fp8_split_k.fp8_linear_into(x, weight, scales, bias, into).float(), expected, 0.02
        )
        if group == 128:
            expected = F.linear(reference.dequantized_rows(x), reference.scaled_weight(weight, scales))
            found = hopper_fp8_split_k.fp8_split_k_gated_linear(
                x, weight, scales, hopper_split_k.PipelineConfig(3)
            )
            assert_agree(reference.dequantized_rows(found), _gated(expected), 0.1)


def _self_test_int4(device: torch.device, dtype: torch.dtype) -> None:
    from saccade.kernels.gemm import hopper_int4_split_k, hopper_split_k

    kernels, config = hopper_int4_split_k, hopper_split_k.PipelineConfig(2, 2)
    cases = ((1, 128, True), (12, 128, False), (20, 32, True), (40, 64, True), (64, 64, False))
    for rows, group, has_zeros in cases:
        own = random_weight(device, 128, 2176, group, has_zeros=has_zeros)  # stages are used more than once
        if not has_zeros:
            own = own._replace(scales=own.scales.to(torch.bfloat16))
        x = torch.randn(rows, own.inputs, device=device, dtype=dtype)
        bias = torch.randn(128, device=device, dtype=dtype)
        expected = reference.int4_split_k_linear(x, own, bias, config).sum(0)
        assert_agree(kernels.int4_split_k_linear(x, own, bias, config).sum(0), expected, 0.02)
        into = torch.zeros(rows, 192, device=device, dtype=dtype)[:, :128]
        assert_agree(kernels.int4_linear_into(x, own, bias, into).float(), expected, 0.05)
        gated = kernels.choose_gated(rows)
        expected = reference.int4_split_k_gated_linear(x, own, gated).float()
        assert_agree(kernels.int4_split_k_gated_linear(x, own, gated).float(), expected, 0.05)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


can_split_k = KernelChoice("the Hopper split-K GEMM", is_hopper, _self_test, "other GEMMs run instead")
can_split_k_fp8 = KernelChoice(
    "the Hopper FP8 split-K GEMM", is_hopper, _self_test_fp8, "weights are converted instead"
)
can_split_k_int4 = KernelChoice(
    "the Hopper INT4 split-K GEMM",
    lambda device, dtype: is_hopper(device) and dtype in (torch.bfloat16, torch.float16),
    _self_test_int4,
    "other INT4 GEMMs run instead",
)
"""(device, dtype of the model)"""
