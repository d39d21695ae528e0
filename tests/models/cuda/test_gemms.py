"""The products of fused layers against the plain decoder's, for every number of rows that is treated differently."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade import costs
from saccade.checkpoint.config import LinearConfig
from saccade.models.cuda.decoder import FusedDecoder, Mixer, Mixers
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.cuda.residual import Residual
from saccade.models.fp8_weights import FP8, Fp8Weights
from saccade.models.layers.decoder import Biases, SelfAttention
from saccade.models.layers.hybrid_decoder import HybridDecoder
from saccade.models.layers.torch_attention import PagedKV
from saccade.models.state_dict import Parameters
from saccade.models.weights import fill_random
from tests.helpers.families.decoder_layers import (
    BIASES,
    DEVICE,
    TEXT,
    assert_close,
    assert_layer_agrees,
    decoder,
    plain_mlp,
    rows_of,
    total,
)
from tests.helpers.kernels.allocations import PeakMemory
from tests.helpers.kernels.moe import config

PROMPT = 600 if DEVICE.type == "cuda" else 130  # the interpreter's prompts are short
EVERY_SIZE = pytest.mark.parametrize("rows", [1, 5, 20, 40, PROMPT], ids=["one", "few", "more", "many", "prompt"])


@pytest.fixture(autouse=True)
def a_prompt_has_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.models.cuda.gemms._MIN_SCRATCH_ROWS", PROMPT)


@BIASES
@EVERY_SIZE
def test_a_layer_projects_adds_and_widens_as_the_plain_one_does(rows: int, biases: Biases) -> None:
    assert_layer_agrees(decoder(biases), rows, 64)


@EVERY_SIZE
def test_what_a_delta_net_has_in_float8_is_projected_into_the_rows_of_its_gates(rows: int) -> None:
    """On a GPU, rows of a prompt are multiplied by cuBLAS, which rounds them to float8 as well."""
    dtype = torch.float32 if rows == PROMPT else torch.float16  # the interpreter has no products of bfloat16
    if DEVICE.type == "cuda":
        dtype = torch.bfloat16
    linear = LinearConfig((0, 1), 1, 4, 64, 128, 4)
    params = Parameters(dtype, DEVICE, quantized=Fp8Weights(in_blocks=True))
    made = HybridDecoder(params.within("decoder"), replace(TEXT, hidden_size=512), linear)
    fill_random(params.targets, 3, DEVICE, params.scales)
    layer, gemms = made.layers[0], DecoderGemms(made).for_rows(rows)
    net = layer.attention
    assert net.inputs.weight.dtype == FP8 and net.gates.weight.dtype == dtype and len(net.gates.weight) == 8
    x = rows_of(rows, 512, 1, dtype)
    found, _ = gemms.project(Residual(x), layer.attention_norm, net.inputs, net.gates)
    normed = layer.attention_norm(x)
    expected = torch.cat((net.inputs(normed), net.gates(normed)), dim=-1)
    tolerance = 0.15 if DEVICE.type == "cuda" and rows == PROMPT else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(
    ("shared", "expected"),
    [(0, "skinny"), (24, "skinny"), (48, "skinny"), (40, "large")],
)
def test_a_layer_of_experts_adds_its_residual(shared: int, expected: str, rows: int) -> None:
    """A shared expert that is not as wide as some others runs by itself: the next norm adds the residual."""
    made = decoder(text=replace(TEXT, experts=config(layers=(0, 1), shared=shared)))
    layer, gemms = made.layers[0], DecoderGemms(made)
    assert gemms.regime(rows).name == (expected if rows <= 4 else "large")
    x = rows_of(rows, 64, 1)
    residual = gemms.for_rows(rows).mlp(Residual(x), layer.mlp_norm, layer.mlp)
    assert_close(total(residual), plain_mlp(x, layer))


@EVERY_SIZE
def test_logits_are_written_where_asked(rows: int) -> None:
    made = decoder()
    gemms = DecoderGemms(made).for_rows(rows)
    x, out = Residual(rows_of(rows, 64, 1)), torch.empty(rows, 200, dtype=torch.float16, device=DEVICE)
    assert gemms.logits(x, made, out) is out
    assert_close(out, made.logits(made.norm(x.rows)).half())


@EVERY_SIZE
def test_what_is_still_to_be_added_is_added_before_the_last_norm(rows: int) -> None:
    made = decoder()
    gemms = DecoderGemms(made).for_rows(rows)
    stream = gemms.add(rows_of(rows, 64, 2), made.layers[0].attention.out, Residual(rows_of(rows, 64, 1)))
    assert_close(gemms.normed(stream, made), made.norm(total(stream)))


def test_few_rows_take_fewer_launches_only_where_the_widest_product_is_ours() -> None:
    made = decoder()
    kinds = [DecoderGemms(made).regime(rows).name for rows in (1, 16, 17, 64)]
    assert kinds == ["skinny", "skinny", "large", "large"]
    exact = decoder(dtype=torch.float32)
    assert DecoderGemms(exact).regime(1).name == "large"


def test_a_prompt_takes_the_memory_that_is_planned_for_it() -> None:
    made, rows = decoder(dtype=torch.float32), 600
    kv = PagedKV.allocate(TEXT, 1, 16, torch.float32, DEVICE)
    fused, embeds = FusedDecoder(made, kv), rows_of(rows, 64, 1, torch.float32)
    with PeakMemory() as memory:
        memory.hold(embeds)
        fused.forward(
            embeds, Mixers({SelfAttention: Mixer(lambda qkv, own, index: qkv[:, :4].flatten(1))}), fused.gemms(rows)
        )
    planned = costs.fused_prompt_bytes_per_token(TEXT, "float32") - 2 * TEXT.head_dim * 4  # angles are the caller's
    assert memory.peak == pytest.approx(rows * planned, rel=0.02)
