"""Products that leave their sums in parts: what is chosen, and that layers and engine can add up what they get.

The kernel needs the device, where `gemms` tries it at start; here its reference stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from saccade import LLM
from saccade.kernels.attention.decode_triton import DecodeWorkspace, paged_decode
from saccade.kernels.gemm import hopper_split_k
from saccade.kernels.gemm.hopper_split_k import PipelineConfig, choose_gated, choose_split_k, suits
from saccade.kernels.ops import reference
from saccade.kernels.ops.norm import add_rms_norm
from saccade.models.cuda import gemms, split_k_table
from saccade.models.cuda.gemms import DecoderGemms, can_split_k
from saccade.models.cuda.residual import Residual
from saccade.models.layers.decoder import Biases
from tests.helpers.engine.async_engine import FEW, OPTIONS, TWO_LAYERS, answers, overlapped
from tests.helpers.engine.async_engine import prompts as prompts_of
from tests.helpers.families.decoder_layers import BIASES, assert_close, decoder, plain_mlp, rows_of
from tests.helpers.families.families import FAMILIES
from tests.helpers.kernels.paged import BLOCK, DEVICE, SMALL, Paged, ints, random

pytestmark = pytest.mark.transformers

SHARED = 227 << 10  # bytes that the programs of a multiprocessor share
SHAPES = [(2048, 1536), (1536, 1536), (1536, 8960), (4608, 3584), (3584, 3584), (12288, 4096), (4096, 11008)]
EVERY_SIZE = pytest.mark.parametrize(
    ("rows", "itemsize"),
    [(2, 2), (17, 2), (33, 2), (64, 2), (65, 2), (128, 2), (2, 1), (17, 1), (33, 1), (64, 1), (128, 1)],
)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "can_split_k", lambda device: True)
    monkeypatch.setattr(hopper_split_k, "suits", lambda *shape: True)
    monkeypatch.setattr(hopper_split_k, "choose_split_k", lambda *shape: PipelineConfig(stages=1, splits=3))
    monkeypatch.setattr(hopper_split_k, "split_k_linear", reference.split_k_linear)
    monkeypatch.setattr(hopper_split_k, "split_k_gated_linear", reference.split_k_gated_linear)


def stage_bytes(rows: int, weights: int, itemsize: int) -> int:
    return (2 * max(16, 1 << (rows - 1).bit_length()) + itemsize * weights) * 64


# --- choosing -----------------------------------------------------------------------------------------------------


@EVERY_SIZE
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_every_split_has_columns_and_its_ring_fits(rows: int, itemsize: int, outputs: int, inputs: int) -> None:
    stages, splits = choose_split_k(rows, outputs, inputs, itemsize)
    steps = -(-inputs // 64)
    share = -(-steps // splits)
    assert (splits - 1) * share < steps <= splits * share
    assert 1 <= stages <= share
    assert stages * stage_bytes(rows, 64, itemsize) < SHARED


@EVERY_SIZE
def test_two_gated_programs_share_a_multiprocessor(rows: int, itemsize: int) -> None:
    used = choose_gated(rows, itemsize).stages * stage_bytes(rows, 128, itemsize) + 2048
    assert 2 * used <= SHARED < 3 * used


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "expected"),
    [
        (128, 2048, 1536, torch.bfloat16, True),
        (128, 2048, 1536, torch.float16, True),
        (129, 2048, 1536, torch.bfloat16, False),
        (32, 2048, 1536, torch.float32, False),
        (32, 2000, 1536, torch.bfloat16, False),
        (32, 2048, 1500, torch.bfloat16, False),
    ],
    ids=str,
)
def test_sizes_it_is_not_made_for_go_another_way(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, expected: bool
) -> None:
    assert suits(rows, outputs, inputs, dtype) is expected


def test_only_hopper_gpus_stream() -> None:
    assert not can_split_k(torch.device("cpu"))


@pytest.mark.usefixtures("streamed")
def test_one_row_and_many_rows_of_large_weights_go_the_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    made = decoder()

    def kinds() -> list[str]:
        return [DecoderGemms(made).regime(rows).name for rows in (1, 2, 32, 33, 128, 129)]

    assert kinds() == ["skinny", *["split-K"] * 4, "large"]
    for module in (gemms, split_k_table):
        monkeypatch.setattr(module, "MAX_ELEMENTS", 100)
    assert kinds() == ["skinny", *["split-K"] * 2, *["large"] * 3]


# --- adding up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_norm_adds_up_what_came_in_parts(parts: int) -> None:
    x, residual, weight = random(parts, 3, 200), random(3, 200, seed=1), random(200, seed=2)
    found, expected = (norm(x, residual, weight, 1e-6) for norm in (add_rms_norm, reference.add_rms_norm))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_parts_are_wider_than_what_they_add_up_to() -> None:
    x, residual = random(3, 2, 64), random(2, 64, dtype=torch.float16, seed=1)
    normed, total = add_rms_norm(x, residual, random(64, dtype=torch.float16, seed=2), 1e-6)
    assert normed.dtype == total.dtype == torch.float16
    assert torch.equal(total, (x[0] + x[1] + x[2] + residual.float()).half())


@pytest.mark.parametrize("splits", [1, 8])
def test_attention_adds_up_a_projection_that_came_in_parts(splits: int) -> None:
    paged, q = Paged.of([40, 7, 100], kv_heads=2, dim=64, dtype=torch.float32), random(3, 6, 64)
    expected, stored = paged.expected(q, [1] * 3), paged.k.clone()
    new = paged.new_tokens(q)
    parts = random(4, *new.qkv.shape, seed=5)
    parts[-1] = new.qkv - parts[:-1].sum(0)
    workspace = DecodeWorkspace.allocate(3 * splits, 6, 2, 64, DEVICE)
    found = paged_decode(
        new._replace(qkv=parts), paged.k, paged.v, paged.tables, ints(paged.seq_lens), BLOCK, 0.2, workspace,
        splits=splits, launch=SMALL,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(paged.k, stored, atol=2e-5, rtol=2e-5, equal_nan=True)


# --- layers and engine --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("streamed")
@BIASES
@pytest.mark.parametrize("rows", [2, 20, 40])
def test_a_layer_in_parts_adds_up_to_the_plain_one(rows: int, biases: Biases) -> None:
    made = decoder(biases)
    layer, ours = made.layers[0], DecoderGemms(made).for_rows(rows, in_parts=True)
    x, mixed = rows_of(rows, 64, 1), rows_of(rows, 64, 2)
    qkv, stream = ours.project(Residual(x), layer.attention_norm, layer.attention.qkv, in_parts=True)
    assert qkv.shape == (3, rows, 128)
    assert_close(qkv.sum(0).half(), layer.attention.qkv(layer.attention_norm(x)))
    added = layer.attention.out(mixed) + x
    stream = ours.add(mixed, layer.attention.out, stream)
    stream = ours.mlp(stream, layer.mlp_norm, layer.mlp)
    assert stream.added is not None
    assert_close((stream.rows + stream.added.sum(0)).half(), plain_mlp(added, layer))
    assert_close(ours.normed(stream, made), made.norm(plain_mlp(added, layer)))


@pytest.mark.usefixtures("streamed")
def test_who_cannot_add_up_gets_queries_and_keys_whole() -> None:
    made = decoder()
    layer, ours = made.layers[0], DecoderGemms(made).for_rows(5)
    qkv, _ = ours.project(Residual(rows_of(5, 64, 1)), layer.attention_norm, layer.attention.qkv, in_parts=True)
    assert qkv.shape == (5, 128)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_products_in_parts_give_the_tokens_of_the_plain_engine(
    name: str, tmp_path: Path, photo: Callable[..., Image.Image]
) -> None:
    folder, given = FAMILIES[name].build(tmp_path, text=TWO_LAYERS), prompts_of(photo, FAMILIES[name].image)[:3]
    assert answers(overlapped(folder), given, FEW) == answers(LLM(str(folder), **OPTIONS), given, FEW)
