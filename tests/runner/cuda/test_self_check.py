"""The check at start: kernels that agree with the plain forward pass are used, others are found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saccade.kernels.attention import cross, registry
from saccade.runner.cuda import cross_attention as cross_tables
from saccade.runner.cuda.self_check import check_logits
from saccade.runner.forward_selector import position_rows
from saccade.runner.torch_forward import TorchForward
from tests.helpers.engine.async_engine import TWO_LAYERS, overlapped
from tests.helpers.families.families import FAMILIES

pytestmark = pytest.mark.transformers

SHORT: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2": {"text": {**TWO_LAYERS, "first_k_dense_replace": 2}},
    "mllama": {"text": {**TWO_LAYERS, "cross_attention_layers": [1]}},
    "internvl": {},
}


def check(folder: Path, max_tokens: int = 41) -> None:
    runner = overlapped(folder).engine.core.runner
    size = runner.forward.block_size
    plain = TorchForward(runner.model, runner.kv, size)
    text = runner.model.config.text
    rows = position_rows(runner.model)
    try:
        check_logits(
            runner.forward, plain, runner.embeddings, text, block_size=size, max_tokens=max_tokens, position_rows=rows
        )
    finally:
        assert not runner.embeddings, "something of the check is left"


@pytest.mark.parametrize("name", SHORT)
def test_kernels_that_agree_pass(name: str, tmp_path: Path) -> None:
    check(FAMILIES[name].build(tmp_path, **SHORT[name]))


def test_an_engine_for_few_tokens_is_checked_with_few_or_not_at_all(tmp_path: Path) -> None:
    folder = FAMILIES["mllama"].build(tmp_path, **SHORT["mllama"])
    for tokens in (1, 17, 18, 30):
        check(folder, tokens)


def test_wrong_latent_attention_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = registry.mla_decode
    monkeypatch.setattr(registry, "mla_decode", lambda *given: right(*given).neg())
    with pytest.raises(RuntimeError, match="logits differ by"):
        check(FAMILIES["deepseek_vl_v2"].build(tmp_path, **SHORT["deepseek_vl_v2"]))


def test_wrong_cross_attention_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cross.cross_attention
    monkeypatch.setattr(cross_tables, "cross_attention", lambda *given, **how: right(*given, **how).zero_())
    with pytest.raises(RuntimeError, match="logits differ by"):
        check(FAMILIES["mllama"].build(tmp_path, **SHORT["mllama"]))
