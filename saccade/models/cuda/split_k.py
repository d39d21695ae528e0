"""Whether split-K GEMMs in Gluon run on a device: decided once, by small ones that PyTorch checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.launch.device import is_hopper
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.ops.quantize_rows import quantize_rows
from saccade.kernels.ops.reference import dequantized_rows


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
    from saccade.kernels.gemm.hopper_fp8_split_k import (
        fp8_linear_into,
        fp8_split_k_gated_linear,
        fp8_split_k_linear,
    )
    from saccade.kernels.gemm.hopper_split_k import PipelineConfig

    weight = (torch.randn(256, 512, device=device) * 16).to(torch.float8_e4m3fn)
    scales = torch.full((2, 4), 1 / 362, device=device)  # sums near 1
    for group in (128, 64):
        x = quantize_rows(torch.randn(20, 512, device=device, dtype=torch.bfloat16), group)
        expected = F.linear(dequantized_rows(x), weight.float() / 362)
        found = fp8_split_k_linear(x, weight, scales, None, PipelineConfig(2, 2)).sum(0)
        assert_agree(found, expected, 2e-3)
        into = torch.zeros(20, 384, device=device, dtype=torch.bfloat16)[:, :256]
        assert_agree(fp8_linear_into(x, weight, scales, None, into).float(), expected, 0.02)
        if group == 128:
            found = dequantized_rows(fp8_split_k_gated_linear(x, weight, scales, PipelineConfig(3)))
            assert_agree(found, _gated(expected), 0.1)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


can_split_k = KernelChoice("the Hopper split-K GEMM", is_hopper, _self_test, "other GEMMs run instead")
can_split_k_fp8 = KernelChoice(
    "the Hopper FP8 split-K GEMM", is_hopper, _self_test_fp8, "weights are converted instead"
)
