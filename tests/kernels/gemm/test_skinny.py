"""Products of few rows against plain PyTorch: in Triton's interpreter on the CPU, on the device where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm.skinny import (
    MAX_ROWS,
    Config,
    SplitWorkspace,
    choose,
    choose_splits,
    gated_linear,
    norm_gated_linear,
    norm_linear,
    norms,
    skinny_linear,
)
from saccade.kernels.ops import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies bfloat16 matrices as if their bits were integers; one row does not go through matrices.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
EPS = 1e-6
VECTOR = Config(rows=1, outputs=4, inputs=64, stages=2)
TILES = Config(rows=16, outputs=16, inputs=32, stages=2)
LAUNCHES = pytest.mark.parametrize("config", [VECTOR, TILES], ids=["vector", "tiles"])


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weights(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a size that leaves products near one."""
    return random(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x.float(), norm.shape, norm.float(), EPS).to(x.dtype)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def workspace(max_rows: int = 128) -> SplitWorkspace:
    """Room that holds nothing anyone could take for a result."""
    room = SplitWorkspace.allocate(max_rows, DEVICE)
    room.partials.fill_(float("nan"))
    room.squares.fill_(float("nan"))
    return room


# --- plain products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 5, 16, 17, 32, 33])
def test_every_number_of_rows_multiplies_as_chosen(m: int) -> None:
    x, weight = random(m, 96, dtype=HALF), weights(200, 96, HALF)
    found = skinny_linear(x, weight, workspace=workspace(), config=choose(m, 200, 96, HALF))
    assert_close(found, F.linear(x, weight))


@LAUNCHES
def test_float32_keeps_its_digits(config: Config) -> None:
    x, weight = random(config.rows, 160), weights(70, 160)
    assert_close(skinny_linear(x, weight, config=config), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_row_takes_every_dtype(dtype: torch.dtype) -> None:
    x, weight = random(1, 160, dtype=dtype), weights(70, 160, dtype)
    assert_close(skinny_linear(x, weight, config=VECTOR), F.linear(x, weight))


@LAUNCHES
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (3, 48), (17, 80), (64, 272)])
def test_sizes_need_not_fill_their_tiles(config: Config, outputs: int, inputs: int) -> None:
    x, weight = random(1, inputs), weights(outputs, inputs)
    assert_close(skinny_linear(x, weight, config=config), F.linear(x, weight))


@LAUNCHES
def test_bias_and_residual_are_added(config: Config) -> None:
    x, weight, bias, residual = random(1, 64), weights(40, 64), random(40, seed=2), random(1, 40, seed=3)
    found = skinny_linear(x, weight, bias, residual, config=config)
    assert_close(found, F.linear(x, weight, bias) + residual)


def test_each_row_gets_its_own_residual() -> None:
    x, weight, residual = random(11, 64), weights(40, 64), random(11, 40, seed=3)
    assert_close(skinny_linear(x, weight, residual=residual, config=TILES), F.linear(x, weight) + residual)


@LAUNCHES
def test_the_result_may_be_wider_than_the_input(config: Config) -> None:
    x, weight = random(1, 64, dtype=torch.float16), weights(40, 64, torch.float16)
    found = skinny_linear(x, weight, config=config, out=torch.empty(1, 40, device=DEVICE))
    torch.testing.assert_close(found, F.linear(x.float(), weight.float()), atol=1e-5, rtol=1e-5)


def test_rows_may_lie_apart() -> None:
    x, weight = random(5, 128)[:, :64], weights(40, 64)
    assert_close(skinny_linear(x, weight, config=TILES), F.linear(x, weight))


# --- splits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [2, 3, 5, 9])
def test_columns_may_be_split_between_programs(splits: int) -> None:
    x, weight, bias, residual = random(7, 272), weights(40, 272), random(40, seed=2), random(7, 40, seed=3)
    found = skinny_linear(x, weight, bias, residual, workspace=workspace(), config=TILES._replace(splits=splits))
    assert_close(found, F.linear(x, weight, bias) + residual)


def test_a_split_without_columns_adds_nothing() -> None:
    x, weight = random(7, 64), weights(40, 64)
    found = skinny_linear(x, weight, workspace=workspace(), config=TILES._replace(splits=4))
    assert_close(found, F.linear(x, weight))


def test_counters_are_zero_after_a_launch() -> None:
    room = workspace()
    skinny_linear(random(7, 272), weights(40, 272), workspace=room, config=TILES._replace(splits=3))
    assert not room.counters.any()


def test_splits_give_the_same_bits_every_time() -> None:
    x, weight, room = random(7, 272), weights(40, 272), workspace()
    first, second = (
        skinny_linear(x, weight, workspace=room, config=TILES._replace(splits=3)) for _ in range(2)
    )  # fmt: skip
    assert torch.equal(first, second)


def test_splits_without_a_workspace_are_refused() -> None:
    with pytest.raises(ValueError, match="3 splits of 3 tiles need a workspace"):
        skinny_linear(random(7, 272), weights(40, 272), config=TILES._replace(splits=3))


def test_a_workspace_that_is_too_small_is_refused_with_the_numbers() -> None:
    small = SplitWorkspace(*(part[:10] for part in workspace()[:3]))
    with pytest.raises(ValueError, match="need 2304 floats and 3 counters of workspace; there are 10 and 10"):
        skinny_linear(random(7, 272), weights(40, 272), workspace=small, config=TILES._replace(splits=3))


def test_more_rows_than_a_launch_is_for_are_refused() -> None:
    with pytest.raises(ValueError, match="17 rows do not fit a launch for 16"):
        skinny_linear(random(17, 64), weights(40, 64), config=TILES)


# --- norms and gates ----------------------------------------------------------------------------------------------


@LAUNCHES
def test_rows_are_normed_on_their_way(config: Config) -> None:
    m = config.rows
    x, norm, weight, bias = random(m, 80) * 30, random(80, seed=2), weights(40, 80), random(40, seed=3)
    found = norm_linear(x, norm, EPS, weight, bias, config=config)
    assert_close(found, F.linear(normed(x, norm), weight, bias))


def test_splits_norm_by_the_whole_row() -> None:
    x, norm, weight = random(9, 272) * 30, random(272, seed=2), weights(40, 272)
    found = norm_linear(x, norm, EPS, weight, workspace=workspace(), config=TILES._replace(splits=3))
    assert_close(found, F.linear(normed(x, norm), weight))


@LAUNCHES
def test_gate_and_up_meet_in_one_launch(config: Config) -> None:
    x, weight = random(config.rows, 80), weights(2 * 42, 80)
    assert_close(gated_linear(x, weight, config=config), gated(x, weight))
    expected = reference.linear_act(x, weight, None, "gelu_and_mul")
    assert_close(gated_linear(x, weight, config=config, gelu=True), expected)


@LAUNCHES
def test_norm_and_gate_go_together(config: Config) -> None:
    x, norm, weight = random(config.rows, 80) * 30, random(80, seed=2), weights(2 * 42, 80)
    found = norm_gated_linear(x, norm, EPS, weight, config=config)
    assert_close(found, gated(normed(x, norm), weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 9, 20, 40])
def test_every_number_of_rows_is_normed_and_gated_as_chosen(m: int, dtype: torch.dtype) -> None:
    x, norm = random(m, 64, dtype=dtype), random(64, dtype=dtype, seed=2)
    weight = weights(2 * 48, 64, dtype)
    assert_close(norm_gated_linear(x, norm, EPS, weight), gated(normed(x, norm), weight))


@pytest.mark.parametrize("m", [1, 9, 40])
def test_the_weights_of_a_norm_may_be_float32(m: int) -> None:
    x, norm, weight = random(m, 64, dtype=HALF), 1 + random(64, seed=2) / 8, weights(2 * 24, 64, HALF)
    expected = F.linear(normed(x, norm).float(), weight.float()).to(HALF)
    assert_close(norm_linear(x, norm, EPS, weight, workspace=workspace()), expected)
    assert_close(norm_gated_linear(x, norm, EPS, weight), gated(normed(x, norm), weight))


def test_too_many_rows_to_norm_in_a_launch_are_normed_before_it() -> None:
    x, norm, weight = random(40, 64), random(64, seed=2), weights(48, 64)
    assert_close(norm_linear(x, norm, EPS, weight), F.linear(normed(x, norm), weight))


def test_float16_is_normed_before_the_matrix_units_see_it() -> None:
    x, norm, weight = random(9, 64, dtype=torch.float16) * 10000, random(64, dtype=torch.float16) * 100, weights(48, 64)
    found = norm_linear(x, norm, EPS, weight.half() / 100)
    assert_close(found, F.linear(normed(x, norm), weight.half() / 100))


def test_a_gated_gemm_is_not_split() -> None:
    with pytest.raises(ValueError, match="a gated GEMM cannot be split, and 2 splits were asked for"):
        gated_linear(random(4, 64), weights(32, 64), config=TILES._replace(splits=2))


# --- choosing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k"), [(33, 64), (1, 70)])
def test_what_no_launch_fits_goes_to_the_library(m: int, k: int) -> None:
    x, norm, weight = random(m, k), random(k, seed=2), weights(2 * 24, k)
    assert choose(m, 48, k, torch.float32) is None
    assert_close(skinny_linear(x, weight, residual=x[:, :48].contiguous()), F.linear(x, weight) + x[:, :48])
    assert_close(norm_linear(x, norm, EPS, weight), F.linear(normed(x, norm), weight))
    assert_close(norm_gated_linear(x, norm, EPS, weight), gated(normed(x, norm), weight))


@pytest.mark.parametrize(("n", "k"), [(2048, 1536), (1536, 8960), (4608, 3584), (4096, 4096)])
def test_every_chosen_launch_fits_the_workspace(n: int, k: int) -> None:
    for m in range(1, MAX_ROWS + 1):
        config, room = choose(m, n, k, torch.bfloat16), SplitWorkspace.allocate(m, torch.device("meta"))
        assert config is not None and config.rows >= m
        programs = -(-n // config.outputs) * config.splits
        assert config.splits == 1 or programs * config.outputs * config.rows <= room.partials.numel()


def test_large_weights_are_ours_for_one_row_alone() -> None:
    assert choose(1, 18944, 3584, torch.bfloat16, gated=True) is not None
    assert choose(2, 18944, 3584, torch.bfloat16, gated=True) is None


def test_float32_goes_to_the_library() -> None:
    assert choose(1, 2048, 1536, torch.float32) is None


def test_small_weights_are_split_until_the_device_is_full() -> None:
    assert [choose_splits(n, k, 64, 64) for n, k in ((1536, 8960), (2048, 1536), (17920, 1536))] == [5, 4, 1]


def test_every_split_has_columns() -> None:
    for k in range(64, 2048, 64):
        splits = choose_splits(64, k, 64, 64)
        share = -(-(k // 64) // splits) * 64
        assert (splits - 1) * share < k


def test_rows_are_normed_in_the_launch_where_few() -> None:
    assert norms(VECTOR, torch.float16) and norms(TILES, torch.bfloat16)
    assert not norms(TILES, torch.float16) and not norms(TILES._replace(rows=32), torch.bfloat16)
