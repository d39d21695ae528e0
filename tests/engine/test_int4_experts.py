"""Experts that stay packed in INT4, from the checkpoint to kernels: the tokens of dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import saccade.models
from saccade import LLM, SamplingParams
from tests.helpers.engine.async_engine import OPTIONS, answers, overlapped
from tests.helpers.families.family_text import build
from tests.helpers.families.quantize import quantize

pytestmark = pytest.mark.transformers

SMALL = {
    "hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1, "mlp_only_layers": [], "num_experts": 3
}  # fmt: skip
HALF = {**OPTIONS, "dtype": "float16"}  # which kernels read beside INT4
GIVEN = [{"prompt": "Five."}]
FEW = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def test_tokens_are_those_of_dequantised_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "awq"
    quantize(build(tmp_path / "plain", "qwen3_moe", changes=SMALL), folder, "awq")
    with LLM(str(folder), **HALF) as llm:  # a CPU dequantises
        expected = answers(llm, GIVEN, FEW)
    monkeypatch.setattr(saccade.models, "keeps_int4", lambda device: True)
    with overlapped(folder, dtype="float16") as llm:
        experts = llm.engine.core.runner.model.decoder.layers[0].mlp
        assert experts.gate_up.dtype == experts.down.dtype == torch.int16
        assert answers(llm, GIVEN, FEW) == expected
