"""x in float8: what norm and gate write, which launches are chosen, and that layers add up to the plain ones.

The split-K kernels need the device, where `split_k` tries them at start; here references stand in for them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from saccade.checkpoint.config import LinearConfig
from saccade.kernels.gemm import hopper_fp8_split_k, skinny
from saccade.kernels.gemm.hopper_fp8_split_k import MAX_ROWS, choose_gated, choose_split_k, suits
from saccade.kernels.gemm.hopper_split_k import PipelineConfig
from saccade.kernels.gemm.skinny import SplitWorkspace
from saccade.kernels.ops import reference
from saccade.kernels.ops.norm import norm_fp8, silu_and_mul_fp8
from saccade.kernels.ops.quantize_rows import Fp8Rows
from saccade.models.cuda import gemm_table, gemms, split_k_table
from saccade.models.cuda.gemm_table import ADDED, Inputs, Launches
from saccade.models.cuda.gemm_weights import weight_of
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.cuda.residual import Residual
from saccade.models.fp8_weights import FP8, Fp8Weights
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.layers.hybrid_decoder import HybridDecoder
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters
from saccade.models.weights import fill_random
from tests.helpers.families.decoder_layers import DEVICE, TEXT, plain_mlp, rows_of

BF16 = torch.bfloat16
SHARED = 227 << 10  # bytes that the programs of an SM share
STEP = 1 / 16  # of a value: float8 has three bits behind the first


def assert_near(found: Tensor, expected: Tensor) -> None:
    """By the rounding of the largest value in a row."""
    largest = expected.float().abs().amax(-1, keepdim=True)
    assert ((found.float() - expected.float()).abs() <= STEP * largest).all()


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_norm_writes_float8(rows: int, parts: int) -> None:
    hidden = 384  # three groups: no power of two
    residual, weight = rows_of(rows, hidden, 1, BF16), rows_of(1, hidden, 2, BF16)[0]
    added = [None, rows_of(rows, hidden, 3, BF16), rows_of(3 * rows, hidden, 4, torch.float32).view(3, rows, hidden)]
    x = added[min(parts, 2)]
    found, total = norm_fp8(x, residual, weight, 1e-6)
    padded = -(-rows // 4) * 4
    assert found.values.shape == (padded, hidden) and found.scales.shape == (3, padded) and found.rows == rows
    if x is None:
        assert total is residual
    nothing = torch.zeros_like(residual)
    expected, summed = reference.add_rms_norm(nothing if x is None else x, residual, weight, 1e-6)
    torch.testing.assert_close(total, summed, atol=2e-2, rtol=2e-2)
    assert_near(reference.dequantized_rows(found), expected)


def test_rows_of_padding_are_the_last_row_again() -> None:
    x = rows_of(5, 512, 1, BF16)
    normed, _ = norm_fp8(None, x, torch.ones(512, dtype=BF16, device=DEVICE), 1e-6)
    gated = silu_and_mul_fp8(x)
    for found in (normed, gated):
        values = found.values.view(torch.uint8)
        assert torch.equal(values[5:], values[4:5].expand(3, -1))
        assert torch.equal(found.scales[:, 5:], found.scales[:, 4:5].expand(-1, 3))


@pytest.mark.parametrize("rows", [1, 6])
def test_a_gate_writes_float8(rows: int) -> None:
    gate_up = rows_of(rows, 2 * 1152, 1, BF16)  # one program has 1024 columns, another the rest
    found = silu_and_mul_fp8(gate_up)
    assert found.group == 128 and found.rows == rows
    assert_near(reference.dequantized_rows(found), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("rows", [1, 17, 33, MAX_ROWS])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (24576, 4096), (128, 128)])
def test_two_programs_share_an_sm_and_every_split_has_columns(rows: int, outputs: int, inputs: int) -> None:
    tile = max(16, 1 << (rows - 1).bit_length())
    stages, splits = choose_split_k(outputs, inputs)
    steps = inputs // 128
    share = -(-steps // splits)
    assert (splits - 1) * share < steps <= splits * share and 1 <= stages <= share
    gated = choose_gated(rows).stages
    assert 2 * stages * (64 + tile) * 128 <= SHARED and 2 * (gated * (128 + tile) * 128 + 64 * tile) <= SHARED
    assert gated >= 3 and suits(rows, outputs, inputs)


def test_sizes_that_are_no_whole_tiles_go_another_way() -> None:
    assert not suits(MAX_ROWS + 1, 256, 256) and not suits(8, 192, 256) and not suits(8, 256, 320)


# --- layers -------------------------------------------------------------------------------------------------------


def fp8_decoder(*, in_blocks: bool = True, biases: Biases | None = None) -> Decoder:
    params = Parameters(BF16, DEVICE, quantized=Fp8Weights(in_blocks=in_blocks))
    text = replace(TEXT, hidden_size=128, intermediate_size=256, head_dim=64)
    made = Decoder(params.within("decoder"), text, biases or Biases())
    fill_random(params.targets, 3, DEVICE, params.scales)
    return made


def _plain(x: Tensor, weight: Tensor, *_: object, out: Tensor, **options: object) -> Tensor:
    """The interpreter has no products of bfloat16."""
    assert options["scales"] is None
    return out.copy_(torch.nn.functional.linear(x, weight))


def takes_fp8(linear: Linear, dtype: torch.dtype) -> bool:
    """Whether split-K takes 20 rows in float8."""
    launches = Launches(split_k_table.SPLIT_K, Inputs(20, dtype, DEVICE), SplitWorkspace.allocate(32, DEVICE), {})
    return launches.way(ADDED, weight_of(linear), in_fp8=True) is not None


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the FP8 GEMMs that ran, which are references."""
    names: list[str] = []

    def noted(name: str, result: Tensor) -> Tensor:
        names.append(name)
        return result

    def linear(*given: object) -> Tensor:
        return noted("split-K", reference.fp8_split_k_linear(*given))  # type: ignore[arg-type]

    def prompt(x: object, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        assert not isinstance(x, Tensor)
        found = reference.fp8_split_k_linear(x, weight, scales, bias, PipelineConfig(1)).sum(0)  # type: ignore[arg-type]
        return noted("cuBLAS", found.to(BF16) if out is None else out.copy_(found))

    def whole(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        found = reference.split_k_linear(x, weight, bias, PipelineConfig(1), scales).sum(0).to(BF16)
        return noted("quantised by the GEMM", found if out is None else out.copy_(found))

    monkeypatch.setattr(skinny, "fp8_linear", whole)
    monkeypatch.setattr(gemms, "can_split_k", lambda device: True)
    for module in (gemms, split_k_table):
        monkeypatch.setattr(module, "can_split_k_fp8", lambda device: True)
    monkeypatch.setattr(gemm_table, "has_fp8_gemm", lambda *given, **kind: True)
    monkeypatch.setattr(gemm_table, "fp8_linear", prompt)

    def into(*given: object) -> Tensor:
        return noted("into rows", reference.fp8_linear_into(*given))  # type: ignore[arg-type]

    monkeypatch.setattr("saccade.models.cuda.gemms._MIN_SCRATCH_ROWS", 128)
    monkeypatch.setattr(hopper_fp8_split_k, "fills_device", lambda outputs: True)
    monkeypatch.setattr(hopper_fp8_split_k, "fp8_linear_into", into)
    monkeypatch.setattr(hopper_fp8_split_k, "fp8_split_k_linear", linear)

    def gate(x: Fp8Rows, weight: Tensor, scales: Tensor, config: PipelineConfig) -> Fp8Rows:
        names.append("gate")
        return reference.fp8_split_k_gated_linear(x, weight, scales, config)

    monkeypatch.setattr(hopper_fp8_split_k, "fp8_split_k_gated_linear", gate)
    return names


@pytest.mark.parametrize(("rows", "in_blocks"), [(1, True), (20, True), (20, False), (130, True)], ids=str)
def test_a_layer_that_multiplies_in_float8_is_near_the_plain_one(
    rows: int, in_blocks: bool, multiplied: list[str]
) -> None:
    made = fp8_decoder(in_blocks=in_blocks)
    layer, ours = made.layers[0], DecoderGemms(made).for_rows(rows, in_parts=True)
    assert layer.mlp.gate_up.weight.dtype == FP8
    x = rows_of(rows, 128, 1, BF16)
    qkv, stream = ours.project(Residual(x), layer.attention_norm, layer.attention.qkv, in_parts=True)
    assert_near(qkv.sum(0) if qkv.dim() == 3 else qkv, layer.attention.qkv(layer.attention_norm(x)))
    found = ours.mlp(stream, layer.mlp_norm, layer.mlp)
    added = found.added if found.added.dim() == 2 else found.added.sum(0)  # type: ignore[union-attr]
    assert_near(found.rows + added, plain_mlp(x, layer))
    assert multiplied == (["split-K", "gate", "split-K"] if rows <= MAX_ROWS else ["cuBLAS"] * 3)


@pytest.mark.parametrize("kind", ["scales of rows", "a gate with a bias"])
def test_a_prompt_stays_in_bfloat16_where_norm_or_gate_cannot_write_float8(kind: str, multiplied: list[str]) -> None:
    biases = Biases(mlp=kind == "a gate with a bias")
    made = fp8_decoder(in_blocks=bool(biases.mlp), biases=biases)
    layer, ours = made.layers[0], DecoderGemms(made).for_rows(130)
    x = rows_of(130, 128, 1, BF16)
    found = ours.mlp(Residual(x), layer.mlp_norm, layer.mlp)
    assert multiplied == ["quantised by the GEMM"] * 2 and found.added is not None
    assert_near(found.rows + found.added, plain_mlp(x, layer))


def test_who_cannot_add_up_gets_whole_rows_that_were_multiplied_in_float8(
    multiplied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta net's inputs, beside which its gates are in bfloat16."""
    linear = LinearConfig((0, 1), 1, 4, 64, 128, 4)
    params = Parameters(BF16, DEVICE, quantized=Fp8Weights(in_blocks=True))
    made = HybridDecoder(params.within("decoder"), replace(TEXT, hidden_size=512), linear)
    fill_random(params.targets, 3, DEVICE, params.scales)
    layer, ours = made.layers[0], DecoderGemms(made).for_rows(20, in_parts=True)
    net, x = layer.attention, rows_of(20, 512, 1, BF16)
    monkeypatch.setattr(gemm_table, "skinny_linear", _plain)
    found, _ = ours.project(Residual(x), layer.attention_norm, net.inputs, net.gates)
    normed = layer.attention_norm(x)
    assert_near(found, torch.cat((net.inputs(normed), net.gates(normed)), dim=-1))
    assert multiplied == ["into rows"]


def test_one_row_goes_to_split_k_only_where_all_layers_are_in_float8(multiplied: list[str]) -> None:
    made = fp8_decoder()
    assert DecoderGemms(made).regime(1).name == "split-K"
    made.layers[1].mlp.down.scales = None
    assert DecoderGemms(made).regime(1).name != "split-K"
    made = fp8_decoder()
    made.layers[1].attention.qkv.scales = None
    assert DecoderGemms(made).regime(1).name != "split-K"


@pytest.mark.parametrize("kernel", ["can_split_k", "can_split_k_fp8"])
def test_a_kernel_that_failed_its_self_test_is_not_used(
    kernel: str, multiplied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gemms, split_k_table):
        monkeypatch.setattr(module, kernel, lambda device: False, raising=False)
    made = fp8_decoder()
    assert DecoderGemms(made).regime(1).name == "skinny"
    if kernel == "can_split_k_fp8":
        assert not takes_fp8(made.layers[0].attention.qkv, BF16)


def test_rows_in_float16_are_not_rounded(multiplied: list[str]) -> None:
    qkv = fp8_decoder().layers[0].attention.qkv
    assert takes_fp8(qkv, BF16) and not takes_fp8(qkv, torch.float16)
