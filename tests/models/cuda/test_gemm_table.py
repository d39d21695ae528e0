"""The tables of GEMMs: what a layer launches on each GPU, by the kind of its weights and the number of rows."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from saccade.kernels.launch.device import Gpu
from saccade.models.cuda.gemm_table import ADDED, GATED, LARGE, SKINNY, WHOLE
from saccade.models.cuda.gemm_weights import Fp8Blocks, Fp8PerRow, Int4, Plain
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.cuda.split_k_table import SPLIT_K
from saccade.models.fp8_weights import Fp8Weights
from saccade.models.int4_weights import Int4Format, Int4Weights
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.state_dict import Parameters
from tests.helpers.families.decoder_layers import TEXT
from tests.helpers.kernels.gemm_launches import META, launches, run_layers

GPUS = {
    "A100": Gpu(108, (8, 0), 163 << 10), "L4": Gpu(58, (8, 9), 99 << 10), "H100": Gpu(132, (9, 0), 227 << 10),
    "B200": Gpu(148, (10, 0), 227 << 10),
}  # fmt: skip
TEXTS = {
    "2B": replace(TEXT, hidden_size=1536, intermediate_size=8960, num_heads=12, num_kv_heads=2, head_dim=128),
    "8B": replace(TEXT, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128),
}
KEPT = {
    "plain": None, "fp8": Fp8Weights(in_blocks=True), "fp8 rows": Fp8Weights(in_blocks=False),
    "int4": Int4Weights({}, default=Int4Format(128, has_zeros=True, dtype=torch.float16)),
}  # fmt: skip
SKINNY_LAYER = "norm_linear skinny_linear norm_gated_linear skinny_linear"
PACKED_LAYER = "int4_linear int4_linear int4_linear int4_linear"
LIBRARY = "skinny_linear skinny_linear add_rms_norm {} skinny_linear"
UNPACKED = (
    "unpack_int4 library_linear unpack_int4 library_linear add_rms_norm unpack_int4 {} unpack_int4 library_linear"
)
SPLIT = "split_k_linear split_k_linear add_rms_norm split_k_gated_linear split_k_linear"
SPLIT_FP8 = "norm_fp8 fp8_split_k_linear split_k_linear norm_fp8 fp8_split_k_gated_linear fp8_split_k_linear"
CUBLAS_FP8 = "norm_fp8 fp8_linear skinny_linear norm_fp8 fp8_linear silu_and_mul_fp8 fp8_linear"
SPLIT_INT4 = "int4_split_k_linear int4_split_k_linear add_rms_norm int4_split_k_gated_linear int4_split_k_linear"
TABLE = [  # shape, weights, GPUs, rows, regime, launches of a layer
    ("2B", "plain", "A100 L4 H100 B200", [1], "skinny", SKINNY_LAYER),
    ("2B", "plain", "A100 L4 B200", [2, 16], "skinny", SKINNY_LAYER),
    ("2B", "plain", "A100 L4 B200", [17, 32], "large", LIBRARY.format("gated_linear")),
    ("2B", "plain", "A100 L4 B200", [33, 64, 128, 600], "large", LIBRARY.format("skinny_linear silu_and_mul")),
    ("2B", "plain", "H100", [2, 17, 33, 65, 128], "split-K", SPLIT),
    ("2B", "plain", "H100", [129], "large", LIBRARY.format("skinny_linear silu_and_mul")),
    ("2B", "plain", "H100", [600], "large", LIBRARY.format("hopper_linear_act")),
    ("8B", "plain", "A100 L4 B200", [2, 16], "large", LIBRARY.format("skinny_linear silu_and_mul")),
    ("8B", "plain", "H100", [2, 32], "split-K", SPLIT),
    ("8B", "plain", "H100", [33, 64], "large", LIBRARY.format("skinny_linear silu_and_mul")),
    ("8B", "fp8", "A100 L4 B200", [1, 2, 16], "skinny", SKINNY_LAYER),
    ("8B", "fp8", "A100 L4 B200", [17, 64], "large", LIBRARY.format("gated_linear")),
    ("8B", "fp8", "A100 L4 B200", [65, 600], "large", LIBRARY.format("skinny_linear silu_and_mul")),
    ("8B", "fp8", "H100", [1, 2, 64], "split-K", SPLIT_FP8),
    ("8B", "fp8", "H100", [65, 600], "large", CUBLAS_FP8),
    ("2B", "fp8", "H100", [65, 128], "split-K", SPLIT),
    ("8B", "fp8 rows", "H100", [1, 64], "split-K", SPLIT_FP8),
    ("8B", "fp8 rows", "H100", [65, 600], "large", LIBRARY.format("skinny_linear silu_and_mul")),
    ("8B", "int4", "A100 L4 B200", [1, 2, 16], "skinny", PACKED_LAYER),
    ("8B", "int4", "A100 L4 B200", [17, 64], "large", "int4_linear int4_linear add_rms_norm int4_linear int4_linear"),
    ("8B", "int4", "A100 L4 B200", [65, 600], "large", UNPACKED.format("library_linear silu_and_mul")),
    ("2B", "int4", "H100", [1], "skinny", PACKED_LAYER),
    ("8B", "int4", "H100", [1, 2, 64], "split-K", SPLIT_INT4),
    ("8B", "int4", "H100", [600], "large", UNPACKED.format("hopper_linear_act")),
]


@pytest.mark.parametrize(("shape", "kind", "gpus", "sizes", "regime", "expected"), TABLE)
def test_a_layer_launches_what_the_table_says(
    shape: str, kind: str, gpus: str, sizes: list[int], regime: str, expected: str
) -> None:
    made = Decoder(Parameters(torch.bfloat16, META, quantized=KEPT[kind]).within("decoder"), TEXTS[shape], Biases())
    for gpu in gpus.split():
        for rows in sizes:
            with launches(GPUS[gpu]) as noted:
                assert DecoderGemms(made).regime(rows).name == regime, (gpu, rows)
                run_layers(made, rows, in_parts=True)
            layer = [name for name, _ in noted if name != "quantize_rows"]
            assert " ".join(layer).startswith(expected), (gpu, rows)


@pytest.mark.parametrize("table", [SKINNY, LARGE, SPLIT_K], ids=["skinny", "large", "split-K"])
@pytest.mark.parametrize("kind", [Plain, Fp8Blocks, Fp8PerRow, Int4])
def test_every_kind_of_weight_has_a_way_that_always_suits(table: object, kind: type[Plain]) -> None:
    assert isinstance(table, dict)
    for operation in (WHOLE, ADDED, GATED):
        ways = [way for way in table[operation] if kind in way.kinds and not way.in_fp8]
        assert ways and ways[-1].suits.__name__ == "_any" and ways[-1].bias


def test_a_choice_and_its_reason_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = Decoder(Parameters(torch.bfloat16, META).within("decoder"), TEXTS["2B"], Biases())
    with caplog.at_level(logging.DEBUG, "saccade.models.cuda"), launches(GPUS["H100"]):
        run_layers(made, 20)
    reasons = [record.message for record in caplog.records]
    assert any("20 rows by split-K GEMMs: few rows" in reason for reason in reasons)
    assert any("added" in reason and reason.endswith("split-K; float8 is converted") for reason in reasons)
