"""INT4 weights by split-K. The kernels need a GPU, where `split_k` tries them at start; references stand in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from torch import Tensor

from saccade.checkpoint.config import LinearConfig
from saccade.kernels.gemm import hopper_fp8_split_k, hopper_int4_split_k
from saccade.kernels.gemm.hopper_int4_split_k import choose_gated, choose_split_k, suits
from saccade.kernels.gemm.hopper_split_k import PipelineConfig
from saccade.kernels.ops import reference
from saccade.models.cuda import gemm_weights, gemms, split_k_table
from saccade.models.cuda.gemm_self_tests import random_int4
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.cuda.residual import Residual
from saccade.models.int4_weights import GroupScales, Int4Format, Int4Weights, dequantized
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.layers.hybrid_decoder import HybridDecoder
from saccade.models.state_dict import Parameters
from tests.helpers.families.decoder_layers import DEVICE, TEXT, assert_close, assert_layer_agrees, rows_of
from tests.helpers.families.int4_layers import WIDTH, packed_decoder

SHARED = 227 << 10
BESIDE = 1 << 10  # bytes of a program that are not in its ring
EVERY_ROWS = pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 64])


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the INT4 GEMMs that ran, which are references."""
    names: list[str] = []

    def noted(name: str) -> Callable[..., Tensor]:
        def run(*given: object) -> Tensor:
            names.append(name.removeprefix("int4_"))
            found: Tensor = getattr(reference, name)(*given)
            return found

        return run

    for name in ("int4_split_k_linear", "int4_split_k_gated_linear", "int4_linear_into"):
        monkeypatch.setattr(hopper_int4_split_k, name, noted(name))
    monkeypatch.setattr(gemms, "can_split_k", lambda device: True)
    monkeypatch.setattr(gemms, "_MIN_INT4_WIDTH", WIDTH)
    for module in (gemms, gemm_weights, split_k_table):
        monkeypatch.setattr(module, "can_split_k_int4", lambda device, dtype: True)
    monkeypatch.setattr(hopper_fp8_split_k, "fills_device", lambda outputs: True)
    return names


@pytest.mark.parametrize("rows", [1, 20, 64])
@pytest.mark.parametrize(("is_ordered", "biases"), [(False, Biases()), (True, Biases(True, True, True))])
def test_a_layer_by_split_k_computes_as_the_dequantised_one(
    rows: int, is_ordered: bool, biases: Biases, multiplied: list[str]
) -> None:
    assert_layer_agrees(packed_decoder(is_ordered=is_ordered, biases=biases), rows, WIDTH)
    gate = "linear_into" if biases.mlp else "split_k_gated_linear"  # a bias comes before the gate
    assert multiplied == ["linear_into", "split_k_linear", gate, "split_k_linear"]


def test_attention_gets_partial_sums_if_it_adds_them_up(multiplied: list[str]) -> None:
    made = packed_decoder(is_ordered=False, biases=Biases(qkv=True))
    layer, x = made.layers[0], rows_of(3, WIDTH, 1)
    ours = DecoderGemms(made).for_rows(3, in_parts=True)
    parts, _ = ours.project(Residual(x), layer.attention_norm, layer.attention.qkv, in_parts=True)
    assert parts.dim() == 3 and multiplied == ["split_k_linear"]
    assert_close(parts.sum(0).half(), layer.attention.qkv(layer.attention_norm(x)))


def kind(made: Decoder, rows: int) -> str:
    return DecoderGemms(made).regime(rows).name


def test_up_to_64_rows_go_to_split_k(multiplied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "MAX_ELEMENTS", 100)
    made = packed_decoder(is_ordered=False, biases=Biases())
    assert [kind(made, rows) for rows in (1, 2, 64, 65)] == [*["split-K"] * 3, "large"]


@pytest.mark.parametrize("part", ["mlp.down", "attention.out"])
def test_one_row_goes_another_way_where_a_layer_is_not_packed(part: str, multiplied: list[str]) -> None:
    made = packed_decoder(is_ordered=False, biases=Biases())
    attrgetter(part)(made.layers[0]).groups = None
    assert [kind(made, rows) for rows in (1, 2)] == ["skinny", "split-K"]


def test_one_row_of_narrow_layers_goes_another_way(multiplied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "_MIN_INT4_WIDTH", WIDTH + 1)
    made = packed_decoder(is_ordered=False, biases=Biases())
    assert [kind(made, rows) for rows in (1, 2)] == ["skinny", "split-K"]


def test_one_row_of_delta_nets_goes_another_way(multiplied: list[str]) -> None:
    """It was not measured there."""
    own = Int4Format(64, has_zeros=True, dtype=torch.float16)
    params = Parameters(torch.float16, DEVICE, quantized=Int4Weights({}, default=own))
    text = replace(TEXT, hidden_size=WIDTH, head_dim=32, intermediate_size=256)
    made = HybridDecoder(params.within("decoder"), text, LinearConfig((0, 1), 1, 4, 64, 128, 4))
    assert made.layers[0].attention.inputs.groups is not None
    assert [kind(made, rows) for rows in (1, 2)] == ["skinny", "split-K"]


def test_a_kernel_that_failed_its_self_test_is_not_used(multiplied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemms, gemm_weights, split_k_table):
        monkeypatch.setattr(module, "can_split_k_int4", lambda device, dtype: False)
    made = packed_decoder(is_ordered=False, biases=Biases())
    assert kind(made, 1) == "skinny"
    assert_layer_agrees(made, 20, WIDTH)
    assert multiplied == []


# --- launches -----------------------------------------------------------------------------------------------------


@EVERY_ROWS
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (256, 128), (64, 18944)], ids=str)
def test_every_split_has_columns_and_its_stages_fit(rows: int, outputs: int, inputs: int, group: int) -> None:
    stages, splits = choose_split_k(rows, outputs, inputs, group)
    steps = -(-inputs // 256)
    share = -(-steps // splits)
    assert (splits - 1) * share < steps <= splits * share
    assert 1 <= stages <= share
    programs = 3 if rows <= 32 and group == 128 else 2  # that share an SM
    assert programs * (stages * stage_bytes(rows) + BESIDE) < SHARED


@EVERY_ROWS
def test_gated_programs_share_an_sm(rows: int) -> None:
    stages, splits = choose_gated(rows)
    assert splits == 1 and stages >= 2
    exchanged = 64 * padded(rows) * 4  # bytes: gate and `up` meet in shared memory
    assert (3 if rows <= 32 else 2) * (stages * stage_bytes(rows) + exchanged + BESIDE) < SHARED


def stage_bytes(rows: int) -> int:
    """256 columns of 64 weight rows in half a byte each, and of x in two."""
    return 256 * (32 + 2 * padded(rows))


def padded(rows: int) -> int:
    return max(8, 1 << (rows - 1).bit_length())


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "expected"),
    [(64, 128, 256, True), (65, 128, 256, False), (1, 96, 256, False), (1, 128, 192, False), (1, 64, 128, True)],
    ids=str,
)
def test_sizes_it_is_not_made_for_go_another_way(rows: int, outputs: int, inputs: int, expected: bool) -> None:
    assert suits(rows, outputs, inputs) is expected


@pytest.mark.parametrize(("group", "has_zeros"), [(128, True), (64, False), (32, True)], ids=str)
def test_references_multiply_by_what_a_weight_stands_for(group: int, has_zeros: bool) -> None:
    own, x = random_int4(DEVICE, 64, 256, group, has_zeros=has_zeros), rows_of(5, 256, 1)
    bias = rows_of(1, 64, 2)[0]
    meant = dequantized(own.weight, GroupScales(own.scales, own.zeros), torch.float32)
    expected = x.float() @ meant.T
    found = reference.int4_split_k_linear(x, own, bias, PipelineConfig(1, 2))
    assert found.shape == (2, 5, 64)
    torch.testing.assert_close(found.sum(0), expected + bias.float(), atol=1e-4, rtol=1e-4)
    gate, up = expected.chunk(2, dim=-1)
    gated = reference.int4_split_k_gated_linear(x, own, PipelineConfig(1))
    assert_close(gated, (torch.nn.functional.silu(gate) * up).half())
