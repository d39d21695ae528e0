"""Compiling ahead leaves nothing behind: what runs afterwards computes what it would have computed without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import LLM
from saccade.models.cuda.moe import prepare_moe
from saccade.models.layers.moe import MoE
from saccade.runner.cuda.gated_delta_net import DeltaNets
from tests.helpers.engine.async_engine import FEW, OPTIONS, answers, new_forward, overlapped, prompts, short
from tests.helpers.families.families import FAMILIES
from tests.helpers.kernels.compiling import compiling_on_the_cpu

pytestmark = pytest.mark.transformers


def compile_ahead_of(llm: LLM) -> int:
    """Passes that were recorded."""
    core = llm.engine.core
    with compiling_on_the_cpu() as recorded:
        kinds = core.runner.forward._kinds.of_requests
        states = next((kind.states for kind in kinds if isinstance(kind, DeltaNets)), None)
        new_forward(core.runner, core.limits, states).capture(64)
    return len(recorded)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_vl_v2", "mllama"])
def test_answers_are_those_of_an_engine_that_did_not_compile_ahead(
    name: str, tmp_path: Path, photo: Callable[..., Any]
) -> None:
    """That is the plain engine, whose tokens are those of the kernels."""
    folder, given = short(name, tmp_path), prompts(photo, FAMILIES[name].image)[:2]
    with LLM(str(folder), **OPTIONS) as plain:
        expected = answers(plain, given, FEW)
    with overlapped(folder) as llm:
        assert compile_ahead_of(llm) > 4
        assert answers(llm, given, FEW) == expected
    assert any(token for tokens in expected for token in tokens), "logits are numbers"


def test_routers_are_whole_after_compiling_ahead(tmp_path: Path) -> None:
    """In bfloat16 they are kept in parts, which are computed once."""
    llm = overlapped(FAMILIES["qwen3_vl_moe"].build(tmp_path), dtype="bfloat16")
    compile_ahead_of(llm)
    experts = [layer.mlp for layer in llm.engine.core.runner.model.decoder.layers if isinstance(layer.mlp, MoE)]
    assert experts
    for own in experts:
        torch.testing.assert_close(prepare_moe(own).router.float().sum(0), own.routers)
    llm.close()
