"""Compiling ahead leaves nothing behind: what runs afterwards computes what it would have computed without it.

Without a GPU: kernels are not launched, and PyTorch's operations inside a graph write nothing and return garbage, as
those of a graph that is never replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import GridExecutor

from saccade import LLM
from saccade.kernels.launch import compile_ahead
from saccade.models.cuda.moe import prepare_moe
from saccade.models.layers.moe import MoE
from saccade.runner.cuda.forward import CudaForward
from tests.helpers.async_engine import FEW, answers, overlapped, prompts
from tests.helpers.families import FAMILIES

pytestmark = pytest.mark.transformers


class NotRun(TorchDispatchMode):
    """Operations that a graph only holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | (kwargs or {})
        written = [
            given[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info and argument.alias_info.is_write
        ]
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        found = func(*args, **(kwargs or {}))
        if any(returned.alias_info for returned in func._schema.returns):
            return found  # a view
        return tree_map_only(torch.Tensor, lambda made: made.fill_(math.nan if made.is_floating_point() else 0), found)


@contextmanager
def compiling_on_the_cpu() -> Iterator[list[str]]:
    """With what was recorded."""
    recorded = []

    def record(run: Callable[[], object]) -> None:
        with NotRun():
            run()
        recorded.append("a pass")

    with (
        patch("saccade.runner.cuda.graph_capture.record", record),
        patch.object(compile_ahead, "_now", compile_ahead._Ahead()),
        patch.object(GridExecutor, "__call__", lambda *_, **__: None),
        patch.object(torch.cuda, "graph_pool_handle", lambda: None),
        patch.object(torch.cuda, "synchronize", lambda _: None),
        patch.object(torch.cuda, "CUDAGraph", object),
    ):
        yield recorded


def compile_ahead_of(llm: LLM) -> int:
    """Passes that were recorded."""
    core = llm.engine.core
    runner, limits = core.runner, core.limits
    text = runner.model.config.text
    with compiling_on_the_cpu() as recorded:
        CudaForward(
            runner.model.decoder,
            runner.kv,
            block_size=limits.block_size,
            max_requests=limits.max_num_seqs,
            max_blocks=limits.max_model_len // limits.block_size,
            axes=3 if text.mrope_section else 1,
            states=runner.forward._states,
            slab=runner.embeddings if text.num_cross_layers else None,
            max_cross_states=4 * limits.encoder_budget,
        ).capture(64)
    return len(recorded)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_vl_v2", "mllama"])
def test_answers_are_those_of_an_engine_that_did_not_compile_ahead(
    name: str, tmp_path: Path, photo: Callable[..., Any]
) -> None:
    family = FAMILIES[name]
    folder = family.build(tmp_path)
    given = prompts(photo, family.image)[:2]
    found = []
    for is_ahead in (False, True):
        llm = overlapped(folder)
        if is_ahead:
            assert compile_ahead_of(llm) > 4
        found.append(answers(llm, given, FEW))
        llm.close()
    assert found[0] == found[1]
    assert any(token for tokens in found[0] for token in tokens), "logits are numbers"


def test_routers_are_whole_after_compiling_ahead(tmp_path: Path) -> None:
    """In bfloat16 they are kept in parts, which are computed once."""
    llm = overlapped(FAMILIES["qwen3_vl_moe"].build(tmp_path), dtype="bfloat16")
    compile_ahead_of(llm)
    experts = [layer.mlp for layer in llm.engine.core.runner.model.decoder.layers if isinstance(layer.mlp, MoE)]
    assert experts
    for own in experts:
        torch.testing.assert_close(prepare_moe(own).router.float().sum(0), own.routers)
    llm.close()
