"""GEMMs with an INT4 weight against the dequantised one: in Triton's interpreter, or on the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm.int4_linear import Int4Weight, Norm, choose_int4, int4_linear
from saccade.kernels.gemm.skinny import MAX_ROWS, Config, SplitWorkspace, checked_workspace
from saccade.kernels.ops.unpack_int4 import unpack_int4, unpack_without_kernel
from saccade.models.int4_weights import GroupScales, dequantized, pack, unpack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no products of bfloat16
TOLERANCE = 2e-2 if DEVICE.type == "cuda" else 4e-3
EPS = 1e-6
INPUTS = 384  # three chunks: no power of two
LAYOUTS = pytest.mark.parametrize(("group", "has_zeros"), [(128, False), (128, True), (64, True), (32, True)], ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(outputs: int, group: int, has_zeros: bool) -> tuple[Int4Weight, Tensor]:
    """Rows and groups of very different sizes: the weight, and what it stands for in float32."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 16, (outputs, INPUTS), generator=generator)
    shape = (outputs, INPUTS // group)
    scales = (torch.rand(shape, generator=generator) * 0.01).half()
    zeros = torch.randint(0, 17, shape, generator=generator, dtype=torch.uint8) if has_zeros else None
    packed = pack(values).to(DEVICE)
    beside = GroupScales(scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE))
    return Int4Weight(packed, beside.scales, beside.zeros), dequantized(packed, beside, torch.float32)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == HALF
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x.float(), norm.shape, norm.float(), EPS)


@pytest.mark.parametrize("rows", [1, 3])
@LAYOUTS
def test_a_linear_layer_adds_bias_and_residual(rows: int, group: int, has_zeros: bool) -> None:
    own, meant = weight_of(70, group, has_zeros)
    x, bias, residual = random(rows, INPUTS), random(70, seed=2), random(rows, 70, seed=3)
    found = int4_linear(x, own, bias, residual, workspace=SplitWorkspace.allocate(64, DEVICE))
    assert_close(found, F.linear(x.float(), meant, bias.float()) + residual.float())


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("in_float32", [False, True])
def test_rows_are_normed_and_gated_on_the_way(rows: int, in_float32: bool) -> None:
    own, meant = weight_of(70, 64, True)
    x, norm = random(rows, INPUTS), random(INPUTS, seed=4, dtype=torch.float32 if in_float32 else HALF).abs()
    wide = F.linear(normed(x, norm), meant)
    workspace = SplitWorkspace.allocate(64, DEVICE)
    assert_close(int4_linear(x, own, norm=Norm(norm, EPS), workspace=workspace), wide)
    gate, up = wide.chunk(2, dim=-1)
    assert_close(int4_linear(x, own, norm=Norm(norm, EPS), gated=True), F.silu(gate) * up)


@pytest.mark.parametrize("inputs", [128, 256])
def test_splits_add_up(inputs: int) -> None:
    own, meant = weight_of(40, 128, True)
    x = random(5, INPUTS)
    config = Config(rows=16, outputs=32, inputs=inputs, splits=2, stages=2)
    found = int4_linear(x, own, workspace=SplitWorkspace.allocate(16, DEVICE), config=config)
    assert_close(found, F.linear(x.float(), meant))


@LAYOUTS
def test_a_weight_is_unpacked_for_many_rows(group: int, has_zeros: bool) -> None:
    own, meant = weight_of(5, group, has_zeros)
    out = torch.empty(5, INPUTS, dtype=torch.float32, device=DEVICE)
    assert torch.equal(unpack_int4(*own, out), meant)
    assert torch.equal(unpack_without_kernel(*own, torch.empty_like(out)), meant)


def test_packing_keeps_every_number() -> None:
    values = torch.randint(0, 16, (3, 256), generator=torch.Generator().manual_seed(1))
    assert torch.equal(unpack(pack(values)), values.int())


@pytest.mark.parametrize("rows", [2, 16, 17, 64])
@pytest.mark.parametrize("outputs", [128, 2048, 6144, 29568, 152064])
@pytest.mark.parametrize("inputs", [128, 2048, 4096, 8192, 29568])
def test_the_workspace_of_a_decoder_is_enough_for_every_launch(rows: int, outputs: int, inputs: int) -> None:
    config = choose_int4(rows, outputs, inputs)
    assert config is not None and config.rows >= rows
    tiles = -(-outputs // config.outputs)
    assert tiles * config.splits >= min(100, tiles * -(-inputs // config.inputs))  # where it can, it fills a GPU
    if config.splits > 1:
        workspace = SplitWorkspace.allocate(MAX_ROWS, torch.device("meta"))
        assert checked_workspace(workspace, config, tiles) is workspace


def test_launches_of_an_8b_model_are_those_that_were_measured() -> None:
    assert choose_int4(1, 6144, 4096) == Config(rows=1, outputs=8, inputs=2048, warps=2)
    assert choose_int4(1, 12288, 4096, gated=True) == Config(rows=1, outputs=4, inputs=4096, warps=2, pdl=False)
    assert choose_int4(8, 6144, 4096) == Config(rows=16, outputs=32, inputs=128, splits=4, warps=2, stages=4)
    down = Config(rows=16, outputs=64, inputs=256, splits=8, warps=4, stages=3, pdl=False)
    assert choose_int4(8, 4096, 12288) == down
    assert choose_int4(32, 4096, 12288) == down._replace(rows=32, stages=2)
    assert choose_int4(32, 6144, 4096) == Config(rows=32, outputs=64, inputs=256, splits=4, warps=4, stages=3)


def test_only_few_rows_have_a_launch() -> None:
    assert choose_int4(65, 256, 512) is None
    assert choose_int4(64, 256, 512) is not None
