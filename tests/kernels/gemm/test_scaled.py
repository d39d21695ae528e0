"""GEMMs with a float8 weight against the dequantised one: in Triton's interpreter, or on the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm.fp8_linear import has_fp8_gemm
from saccade.kernels.gemm.skinny import (
    Config,
    SplitWorkspace,
    choose,
    gated_linear,
    norm_gated_linear,
    norm_linear,
    skinny_linear,
)
from saccade.kernels.ops.quantize_rows import quantize_rows
from saccade.models.fp8_weights import dequantized, quantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no products of bfloat16
TOLERANCE = 2e-2 if DEVICE.type == "cuda" else 4e-3
EPS = 1e-6
INPUTS = 384  # three blocks: no power of two
LAYOUTS = pytest.mark.parametrize("in_blocks", [True, False], ids=["blocks", "rows"])
ROWS = pytest.mark.parametrize("rows", [1, 3, 20])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(outputs: int, in_blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of very different sizes: the weight, its scales, and what they stand for in float32."""
    sizes = torch.linspace(0.01, 1, outputs, device=DEVICE)[:, None]
    values, scales = quantized(random(outputs, INPUTS, seed=1, dtype=torch.float32) * sizes / INPUTS**0.5, in_blocks)
    return values, scales, dequantized(values, scales, torch.float32)


def workspace() -> SplitWorkspace:
    return SplitWorkspace.allocate(64, DEVICE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == HALF
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x.float(), norm.shape, norm.float(), EPS)


@ROWS
@LAYOUTS
def test_a_linear_layer_adds_bias_and_residual(rows: int, in_blocks: bool) -> None:
    weight, scales, meant = weight_of(256, in_blocks)
    x, bias, residual = random(rows, INPUTS), random(256, seed=2), random(rows, 256, seed=3)
    found = skinny_linear(x, weight, bias, residual, scales=scales, workspace=workspace())
    assert_close(found, F.linear(x.float(), meant, bias.float()) + residual.float())


@ROWS
@LAYOUTS
def test_rows_are_normed_and_gated_on_the_way(rows: int, in_blocks: bool) -> None:
    weight, scales, meant = weight_of(256, in_blocks)
    x, norm = random(rows, INPUTS), random(INPUTS, seed=4).abs()
    wide = F.linear(normed(x, norm), meant)
    assert_close(norm_linear(x, norm, EPS, weight, scales=scales, workspace=workspace()), wide)
    gate, up = wide.chunk(2, dim=-1)
    assert_close(norm_gated_linear(x, norm, EPS, weight, scales=scales), F.silu(gate) * up)
    gate, up = F.linear(x.float(), meant).chunk(2, dim=-1)
    assert_close(gated_linear(x, weight, scales=scales), F.silu(gate) * up)


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_add_up_in_columns_of_wider_rows(splits: int) -> None:
    weight, scales, meant = weight_of(128, True)
    x, rows, residual = random(5, INPUTS), random(5, 140, seed=2), random(5, 128, seed=3)
    before = rows.clone()
    config = Config(rows=16, outputs=64, inputs=128, splits=splits, stages=2)
    given = {"scales": scales, "workspace": workspace(), "config": config}
    found = skinny_linear(x, weight, None, residual, **given, out=rows[:, 8:136])
    assert_close(found, F.linear(x.float(), meant) + residual.float())
    assert torch.equal(rows[:, :8], before[:, :8]) and torch.equal(rows[:, 136:], before[:, 136:])


def test_a_launch_keeps_its_rows_within_a_block() -> None:
    weight, scales, _ = weight_of(256, True)
    wide = Config(rows=16, outputs=256, inputs=128)
    with pytest.raises(AssertionError):
        skinny_linear(random(2, INPUTS), weight, scales=scales, workspace=workspace(), config=wide)


def test_many_rows_and_odd_widths_have_no_launch() -> None:
    assert choose(65, 256, 512, HALF, scaled=True) is None
    assert choose(64, 256, 512, HALF, scaled=True) is not None
    assert choose(1, 256, 320, HALF, scaled=True) is None


@pytest.mark.parametrize("group", [128, INPUTS])
def test_rows_are_quantised_with_a_scale_for_each_group(group: int) -> None:
    x = random(5, INPUTS)
    x[3] = 0
    values, scales, _ = quantize_rows(x, group)
    rows = 5 if group == INPUTS else 8  # padded
    assert values.shape == (rows, INPUTS) and scales.shape == (INPUTS // group, rows)
    groups = values.float().view(rows, -1, group) * scales.T[..., None]
    found = groups.view(rows, INPUTS)[:5]
    assert (found - x.float()).abs().max() <= x.float().abs().max() / 16
    assert values.float().abs().amax(-1)[0] == 448 and not found[3].any()


def test_only_gpus_have_float8_gemms() -> None:
    assert not has_fp8_gemm(torch.empty(1, 1), torch.bfloat16, in_blocks=False)
