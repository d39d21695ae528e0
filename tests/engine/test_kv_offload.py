"""The same tokens come out where KV blocks go to host memory and come back as with a cache that holds everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saccade import LLM, SamplingParams, costs
from saccade.engine import build
from saccade.errors import ConfigError
from saccade.kernels.ops.copy_kv_blocks import copy_blocks
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.engine.async_engine import FEW, OPTIONS, TWO_LAYERS, overlapped
from tests.helpers.engine.engine_runs import prompts
from tests.helpers.families.families import FAMILIES

pytestmark = pytest.mark.transformers

SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=4, ignore_eos=True)
SHORT: dict[str, Any] = {"deepseek_vl_v2": {**TWO_LAYERS, "first_k_dense_replace": 2}}
LONG = [{"prompt_token_ids": [first + i for i in range(50)]} for first in (10, 60, 110)]  # three blocks each
Params = SamplingParams | list[SamplingParams]


@pytest.fixture(autouse=True)
def always_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's rates are."""
    monkeypatch.setattr(build, "min_restored", lambda *_: 1)


def gib(folder: Path, blocks: int) -> float:
    text = open_checkpoint(str(folder)).config.text
    return (blocks + 0.5) * costs.kv_bytes_per_block(text, "float32") / costs.GIB


def small(folder: Path, blocks: int, make: Any = LLM, **given: Any) -> LLM:
    """Few blocks on the device, many in host memory."""
    sizes = {"kv_cache_gb": gib(folder, blocks), "max_model_len": blocks * 16, "kv_offload_gb": gib(folder, 400)}
    return make(folder, **{**OPTIONS, "max_pixels": 60_000, **sizes, **given})


def plain(folder: Path, asked: list[dict[str, Any]], params: Params, **given: Any) -> list[list[int]]:
    """One request at a time, and no cache."""
    with LLM(str(folder), **{**OPTIONS, "max_pixels": 60_000, "enable_prefix_caching": False, **given}) as llm:
        return tokens(llm, asked, params, together=False)


def tokens(llm: LLM, asked: list[dict[str, Any]], params: Params, *, together: bool) -> list[list[int]]:
    each = params if isinstance(params, list) else [params] * len(asked)
    batches = [(asked, each)] if together else [([one], [own]) for one, own in zip(asked, each, strict=True)]
    outs = [out for batch, own in batches for out in llm.generate(batch, own, use_tqdm=False)]
    llm.engine.core.scheduler.check()
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize(
    ("name", "params"),
    [("qwen2_vl", FEW), ("qwen2_vl", SEEDED), ("deepseek_vl_v2", FEW), ("mllama", FEW)],
    ids=["greedy", "sampled", "latent", "cross-attention"],
)
def test_conversations_that_left_the_device_go_on_as_if_they_had_stayed(
    name: str, params: SamplingParams, tmp_path: Path
) -> None:
    """Keys and values; MLA's latent vectors; beside cross-attention, whose images are another cache's."""
    family = FAMILIES[name]
    folder = family.build(tmp_path, **SHORT.get(name, {}))
    asked = [*prompts(family.image)[:3], *LONG]
    expected = plain(folder, asked, params)
    with small(folder, 9) as llm:
        for _ in range(2):
            assert tokens(llm, asked, params, together=False) == expected
        stats = llm.stats()
        assert stats["kv_offload"]["blocks_in"] > 4
        assert stats["kv_bytes_per_block"] == costs.kv_bytes_per_block(
            llm.engine.core.runner.model.config.text, "float32"
        )


def test_preempted_requests_come_back_with_what_they_generated(qwen2_vl_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = plain(qwen2_vl_folder, LONG, params)
    with small(qwen2_vl_folder, 8) as llm:
        assert tokens(llm, LONG, params, together=True) == expected
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["kv_offload"]["blocks_in"] > 0


def test_steps_launched_ahead_and_the_kernel_give_the_same_tokens(two_layers: Path) -> None:
    params = [FEW, SEEDED, FEW]
    expected = plain(two_layers, LONG, params)
    with small(two_layers, 7, make=overlapped) as llm:
        llm.engine.core.runner.host_blocks._copy_blocks = copy_blocks
        for together in (True, False):
            assert tokens(llm, LONG, params, together=together) == expected
        assert llm.stats()["kv_offload"]["blocks_in"] > 4


def test_a_salt_keeps_what_is_in_host_memory_apart(qwen2_vl_folder: Path) -> None:
    mine = {**LONG[0], "cache_salt": "mine"}
    with small(qwen2_vl_folder, 7) as llm:
        for prompt in (mine, *LONG[1:]):
            llm.generate(prompt, FEW, use_tqdm=False)
        (stranger,) = llm.generate({**mine, "cache_salt": "yours"}, FEW, use_tqdm=False)
        assert stranger.num_cached_tokens == 0
        (own,) = llm.generate(mine, FEW, use_tqdm=False)
        assert own.num_cached_tokens == 48
        assert llm.stats()["kv_offload"]["blocks_in"] == 3
        assert own.outputs[0].token_ids == stranger.outputs[0].token_ids


def test_a_request_may_be_aborted_right_after_its_blocks_were_asked_for(qwen2_vl_folder: Path) -> None:
    with small(qwen2_vl_folder, 7) as llm:
        expected = tokens(llm, LONG, FEW, together=False)
        llm.engine.add_request("back", LONG[0], FEW)
        llm.engine.step()
        assert llm.stats()["kv_offload"]["blocks_in"] > 0
        llm.engine.abort_request("back")
        llm.engine.core.scheduler.check()
        assert tokens(llm, LONG[:1], FEW, together=False) == expected[:1]


def test_where_computing_is_faster_nothing_is_kept_and_the_log_says_so(
    qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "min_restored", lambda *_: None)
    with small(qwen2_vl_folder, 14) as llm:
        core = llm.engine.core
        assert core.runner.host_blocks is None and core.limits.host_blocks == 0
        assert any("KV offload is off, since computing is faster" in reason for reason in core.reasons)
        llm.generate("Hello", FEW, use_tqdm=False)


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_5"].build(tmp_path)
    with pytest.raises(ConfigError, match="recurrent layers need a state"):
        LLM(str(folder), **OPTIONS, kv_offload_gb=0.1)


def test_without_a_prefix_cache_it_is_refused(qwen2_vl_folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_offload_gb=1 needs the prefix cache"):
        LLM(str(qwen2_vl_folder), enable_prefix_caching=False, kv_offload_gb=1)
