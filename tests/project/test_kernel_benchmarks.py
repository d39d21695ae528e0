"""The cases of `benchmarks.kernels` are right at small sizes, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.kernels import attention, delta, gemm, latent, moe, small
from benchmarks.kernels.harness import Case, line_of, rows_of
from saccade.kernels.attention.mla_expanded import MLADims
from saccade.kernels.gdn.layout import GDNShape
from saccade.kernels.launch.device import Heads
from saccade.kernels.moe.topk_routing import RoutingRules
from saccade.types.media import Size

HEADS = Heads(4, 2, 32)
DIMS = MLADims(rank=32, nope=16, rope=16, value=16)
DELTA = GDNShape(2, 4, 16, 16, 4)
EXPERTS = moe.Shape("small", 64, 32, 4, RoutingRules(2, normalise=True, shared=1), True)
PACKED = moe.Shape("small", 256, 128, 4, RoutingRules(2))
GEMM = gemm.Gemm("small", 64, 256, gated=True, normed=True)
ACTIVATION = gemm.Activation("quick_gelu", 32, 48, True, (5,), torch.float16)

SUITES = {
    "decode": lambda: attention.decode([attention.Decode("small", HEADS, [5, 33], 32)]),
    "decode of FP8": lambda: attention.decode([attention.Decode("small", HEADS, [5, 33], 32, is_fp8=True)]),
    "prefill": lambda: attention.prefill([attention.Prefill("small", HEADS, [3, 20], [9, 20], 300.0)]),
    "images": lambda: attention.vit([attention.Vit([20, 33], 16, 2, 300.0)]),
    "latent decode": lambda: latent.decode([latent.Decode(4, [5, 40], DIMS)]),
    "latent prefill": lambda: latent.prefill([latent.Prefill(4, [3, 10], [9, 10], DIMS)]),
    "latent store": lambda: latent.store([(4, 3)], DIMS),
    "delta decode": lambda: delta.decode([delta.Decode(3, DELTA)]),
    "delta prefill": lambda: delta.prefill([delta.Prefill([5, 70], 4, DELTA)]),
    "GEMM of a row": lambda: gemm.decode([GEMM, GEMM._replace(gated=False)], [1]),
    "GEMM": lambda: gemm.decode([gemm.Gemm("small", 64, 256)], [5, 20]),
    "INT4": lambda: gemm.int4([gemm.Gemm("small", 64, 256)], [1, 5]),
    "activation": lambda: gemm.activation([ACTIVATION]),
    "qkv": lambda: gemm.qkv_rope([5], 2, 32, 80),
    "experts": lambda: moe.layers([EXPERTS], [1, 9]),
    "around experts": lambda: moe.parts([EXPERTS], [9]),
    "INT4 experts": lambda: moe.int4([PACKED], [1, 9]),
    "norms": lambda: small.elementwise([3], 64, 32),
    "heads": lambda: small.heads([3], [(HEADS, 16)]),
    "vision": lambda: small.vision([5], 32, 64, 2),
    "patches": lambda: small.images([Size(90, 70)]),
}


@pytest.mark.parametrize("suite", SUITES)
def test_a_small_case_is_right(suite: str) -> None:
    torch.manual_seed(0)
    cases: Iterator[Case] = SUITES[suite]()
    rows = [row for case in cases for row in rows_of(case)]
    assert [row for row in rows if row.error is not None]
    assert not [line_of(row) for row in rows if not row.is_right]
