"""Whether a device runs the kernels of quantised and split-K GEMMs: small ones are tried once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm.int4_linear import MAX_INT4_ROWS, Int4Weight, int4_linear
from saccade.kernels.gemm.skinny import MAX_ROWS, SplitWorkspace
from saccade.kernels.launch.device import is_hopper
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.ops import reference
from saccade.kernels.ops.quantize_rows import quantize_rows
from saccade.kernels.ops.unpack_int4 import unpack_int4, unpack_without_kernel


def _test_split_k(device: torch.device) -> None:
    # Gluon is experimental: only where used, as below
    from saccade.kernels.gemm import hopper_split_k as kernels

    x, weight = (torch.randn(rows, 256, device=device, dtype=torch.bfloat16) / 8 for rows in (20, 128))
    expected = F.linear(x.float(), weight.float())
    partials = kernels.split_k_linear(x, weight, None, kernels.PipelineConfig(2, 2))
    assert_agree(partials.sum(0), expected, 1e-3)
    gated = kernels.split_k_gated_linear(x, weight, kernels.PipelineConfig(3))
    assert_agree(gated.float(), reference.silu_and_mul(expected), 0.02)


def _test_split_k_fp8(device: torch.device) -> None:
    from saccade.kernels.gemm import hopper_fp8_split_k as kernels
    from saccade.kernels.gemm.hopper_split_k import PipelineConfig

    weight = (torch.randn(256, 1024, device=device) * 16).to(torch.float8_e4m3fn)
    sizes = ((2, 8), (256, 1))
    blocks, of_rows = ((torch.rand(size, device=device) + 0.5) / 512 for size in sizes)  # sums near 1
    bias = torch.randn(256, device=device, dtype=torch.bfloat16)
    for rows, group, scales in ((20, 128, blocks), (64, 64, blocks), (5, 128, of_rows)):
        x = quantize_rows(torch.randn(rows, 1024, device=device, dtype=torch.bfloat16), group)
        gemm = (x, weight, scales, bias)
        expected = reference.fp8_split_k_linear(*gemm, PipelineConfig(2, 2)).sum(0)
        assert_agree(kernels.fp8_split_k_linear(*gemm, PipelineConfig(2, 2)).sum(0), expected, 2e-3)
        into = torch.zeros(rows, 384, device=device, dtype=torch.bfloat16)[:, :256]
        assert_agree(kernels.fp8_linear_into(*gemm, into).float(), expected, 0.02)
        if group == 128:
            expected = F.linear(reference.dequantized_rows(x), reference.scaled_weight(weight, scales))
            gated = kernels.fp8_split_k_gated_linear(x, weight, scales, PipelineConfig(3))
            assert_agree(reference.dequantized_rows(gated), reference.silu_and_mul(expected), 0.1)


def _test_split_k_int4(device: torch.device, dtype: torch.dtype) -> None:
    from saccade.kernels.gemm import hopper_int4_split_k as kernels
    from saccade.kernels.gemm.hopper_split_k import PipelineConfig

    config = PipelineConfig(2, 2)
    cases = ((1, 128, True), (12, 128, False), (20, 32, True), (40, 64, True), (64, 64, False))
    for rows, group, has_zeros in cases:
        packed = random_int4(device, 128, 2176, group, has_zeros=has_zeros)  # stages are used more than once
        if not has_zeros:
            packed = packed._replace(scales=packed.scales.to(torch.bfloat16))
        x = torch.randn(rows, packed.inputs, device=device, dtype=dtype)
        bias = torch.randn(128, device=device, dtype=dtype)
        expected = reference.int4_split_k_linear(x, packed, bias, config).sum(0)
        assert_agree(kernels.int4_split_k_linear(x, packed, bias, config).sum(0), expected, 0.02)
        into = torch.zeros(rows, 192, device=device, dtype=dtype)[:, :128]
        assert_agree(kernels.int4_linear_into(x, packed, bias, into).float(), expected, 0.05)
        gate = kernels.choose_gated(rows)
        expected = reference.int4_split_k_gated_linear(x, packed, gate).float()
        assert_agree(kernels.int4_split_k_gated_linear(x, packed, gate).float(), expected, 0.05)


def random_int4(
    device: torch.device, outputs: int, inputs: int, group: int, *, has_zeros: bool = True
) -> Int4Weight:
    """Results are near 1."""
    packed = torch.randint(-(2**15), 2**15, (outputs, inputs // 4), device=device, dtype=torch.int16)
    scales = (torch.rand(outputs, inputs // group, device=device) + 0.5) / (4.6 * inputs**0.5)
    zeros = torch.randint(6, 11, scales.shape, device=device, dtype=torch.uint8) if has_zeros else None
    return Int4Weight(packed, scales.to(torch.float16), zeros)


def _int4_and_meaning(device: torch.device) -> tuple[Int4Weight, Tensor]:
    packed = random_int4(device, 64, 2048, 64)
    return packed, unpack_without_kernel(*packed, torch.empty(64, packed.inputs, device=device))


def _test_int4(device: torch.device, dtype: torch.dtype) -> None:
    packed, meaning = _int4_and_meaning(device)
    workspace = SplitWorkspace.allocate(MAX_ROWS, device)
    for rows in (1, 8, MAX_INT4_ROWS):
        x = torch.randn(rows, packed.inputs, device=device, dtype=dtype)
        expected = F.linear(x.float(), meaning)
        assert_agree(int4_linear(x, packed, workspace=workspace).float(), expected, 0.05)
        assert_agree(int4_linear(x, packed, gated=True).float(), reference.silu_and_mul(expected), 0.05)


def _test_unpacking(device: torch.device, dtype: torch.dtype) -> None:
    packed, meaning = _int4_and_meaning(device)
    out = torch.empty(meaning.shape, device=device, dtype=dtype)
    assert_agree(unpack_int4(*packed, out).float(), meaning, 1e-3)  # less than a step


def _is_16_bit(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


can_split_k = KernelChoice("the Hopper split-K GEMM", is_hopper, _test_split_k, "other GEMMs run instead")
can_split_k_fp8 = KernelChoice(
    "the Hopper FP8 split-K GEMM", is_hopper, _test_split_k_fp8, "weights are converted instead"
)
can_split_k_int4 = KernelChoice(  # (device, dtype of the model), as the next
    "the Hopper INT4 split-K GEMM",
    lambda device, dtype: is_hopper(device) and _is_16_bit(device, dtype),
    _test_split_k_int4,
    "other INT4 GEMMs run instead",
)
can_multiply_int4 = KernelChoice(
    "the INT4 GEMM of a few rows", _is_16_bit, _test_int4, "weights are unpacked for it"
)
can_unpack_int4 = KernelChoice(
    "the kernel that unpacks INT4", lambda *_: True, _test_unpacking, "PyTorch dequantises weights"
)
