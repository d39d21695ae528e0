"""An FP8 KV cache gives the tokens of rounded keys and values, also through kernels and after a way to host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import LLM, SamplingParams, costs
from saccade.engine import build
from saccade.models.layers import torch_attention
from saccade.models.layers.torch_attention import as_stored
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.engine.async_engine import OPTIONS, overlapped

FP8: dict[str, Any] = {**OPTIONS, "kv_cache_dtype": "fp8"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = [{"prompt_token_ids": [first + i for i in range(50)]} for first in (10, 60, 110)]  # three blocks each


def answers(llm: LLM, params: SamplingParams = GREEDY, count: int = 3) -> list[list[int]]:
    outs = llm.generate(LONG[:count], params, use_tqdm=False)
    llm.engine.core.scheduler.check()
    return [out.outputs[0].token_ids for out in outs]


def test_tokens_are_those_of_keys_and_values_that_were_rounded_before(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(two_layers), **FP8) as llm:
        found = answers(llm)
        stats = llm.stats()
        text = llm.engine.core.runner.model.config.text
        assert stats["kv_cache_dtype"] == "float8_e4m3fn"
        assert stats["kv_bytes_per_token"] * 4 == costs.kv_bytes_per_token(text, "float32")

    def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return as_stored(x, scale, torch.float8_e4m3fn).float() * scale

    monkeypatch.setattr(torch_attention, "as_stored", rounded)
    with LLM(str(two_layers), **OPTIONS) as llm:
        assert answers(llm) == found


def test_kernels_give_the_tokens_of_pytorch(two_layers: Path) -> None:
    """Prefill, decode and the new token's way into the cache, in Triton's interpreter."""
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(two_layers), **FP8) as llm:
        expected = answers(llm, few, 2)
    with overlapped(two_layers, kv_cache_dtype="fp8", max_num_batched_tokens=64) as llm:
        assert llm.engine.core.runner.kv.k.dtype == torch.float8_e4m3fn
        assert answers(llm, few, 2) == expected


def test_preempted_requests_come_back_from_host_memory_with_half_the_bytes_of_float16(
    qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "min_restored", lambda *_: 1)  # whatever the machine's rates are
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(qwen2_vl_folder), **{**FP8, "enable_prefix_caching": False}) as llm:
        expected = answers(llm, params)
    text = open_checkpoint(str(qwen2_vl_folder)).config.text
    per_block = costs.kv_bytes_per_block(text, costs.FP8)
    sizes = {"kv_cache_gb": 8.5 * per_block / costs.GIB, "kv_offload_gb": 400.5 * per_block / costs.GIB}
    with LLM(str(qwen2_vl_folder), **{**FP8, **sizes, "max_model_len": 128}) as llm:
        assert answers(llm, params) == expected
        stats = llm.stats()
        assert stats["preemptions"] > 0 and stats["kv_offload"]["blocks_in"] > 0
        assert stats["kv_bytes_per_block"] == costs.kv_bytes_per_block(text, "float16") // 2 == per_block
