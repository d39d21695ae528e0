"""Delta nets whose wide projection stays in float8, beside gates that do not: the tokens of dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import saccade.models
from saccade import LLM, SamplingParams
from saccade.models import load_model
from saccade.models.fp8_weights import FP8
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.engine.async_engine import OPTIONS, TWO_LAYERS, answers, overlapped
from tests.helpers.families.families import FAMILIES
from tests.helpers.families.family_qwen3_5 import WHOLE_BLOCKS
from tests.helpers.families.quantize import quantize

pytestmark = pytest.mark.transformers

SHORT = {**TWO_LAYERS, **WHOLE_BLOCKS, "layer_types": ["linear_attention", "full_attention"]}
GIVEN = [{"prompt": "Five."}]
FEW = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def fp8_checkpoint(name: str, folder: Path) -> Path:
    quantize(FAMILIES[name].build(folder / "plain", text=SHORT), folder / "fp8", "fp8-blocks")
    return folder / "fp8"


def net_of(llm: LLM) -> Any:
    return llm.engine.core.runner.model.decoder.layers[0].attention


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_tokens_are_those_of_dequantised_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fp8_checkpoint(name, tmp_path)
    with LLM(str(folder), **OPTIONS) as llm:  # a CPU dequantises
        assert net_of(llm).gates is None
        expected = answers(llm, GIVEN, FEW)
    monkeypatch.setattr(saccade.models, "multiplies_fp8", lambda device: True)
    with overlapped(folder) as llm:
        net = net_of(llm)
        assert net.inputs.weight.dtype == net.out.weight.dtype == FP8 and len(net.inputs.weight) == 384
        assert net.gates.weight.dtype == torch.float32 and len(net.gates.weight) == 8
        assert answers(llm, GIVEN, FEW) == expected
    with mock.patch("saccade.runner.build.pack_where_faster"), LLM(str(folder), **OPTIONS) as llm:  # in PyTorch
        assert net_of(llm).gates is not None
        assert answers(llm, GIVEN, FEW) == expected


def test_random_weights_are_split_as_stored_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saccade.models, "multiplies_fp8", lambda device: True)
    folder = fp8_checkpoint("qwen3_5", tmp_path)
    config = open_checkpoint(str(folder)).config
    given = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "dummy"}
    net: Any = load_model(folder, config, **given).decoder.layers[0].attention  # type: ignore[attr-defined]
    assert net.inputs.weight.dtype == FP8 and net.gates.scales is None
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    for linear in (net.inputs, net.gates):
        assert 0.8 < linear(x).std() < 1.2
