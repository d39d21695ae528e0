"""A request whose layers all have windows gives back KV blocks while it runs, and its tokens stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade import LLM, SamplingParams
from saccade.types.attention_reach import AttentionReach
from tests.helpers.families.zoo import ZOO, second_half
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

SAMPLING = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def answer(llm: LLM, image: str) -> tuple[list[int], int]:
    """Its tokens, and the most KV blocks that it held. What no request holds is no number after each step."""
    engine, scheduler = llm.engine, llm.engine.core.scheduler
    prompt = {"prompt": f"{image}What is it?", "multi_modal_data": {"image": make_photo(60, 50)}}
    engine.add_request("r", prompt, SAMPLING)
    peak = 0
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for out in engine.step():
            tokens = list(out.outputs[0].token_ids)
        scheduler.check()
        held = scheduler._kv_cache.users()
        peak = max(peak, len(held))
        kv = engine.core.runner.kv
        blocks = kv.k.view(len(kv.k), -1, llm.engine.limits.block_size, *kv.k.shape[2:])
        free = torch.tensor([block for block in range(blocks.shape[1]) if block not in held])
        for cache in kv.caches:
            cache.view(blocks.shape)[:, free] = torch.nan
    return tokens, peak


@pytest.mark.parametrize(
    ("name", "reach"),
    [("idefics2", AttentionReach(32 + 63)), ("unlimited_ocr", AttentionReach(8 + 63, has_prompt=True))],
)
def test_a_long_answer_holds_the_blocks_that_are_read(name: str, reach: AttentionReach, tmp_path: Path) -> None:
    entry = ZOO[name]
    sizes = {"kv_cache_gb": 0.001, "use_tqdm": False, "max_model_len": 256, "enable_prefix_caching": False}
    with second_half.libraries(name), LLM(str(entry.build(tmp_path)), **{**sizes, **entry.options}) as llm:
        scheduler = llm.engine.core.scheduler
        assert scheduler.config.reach == reach
        tokens, peak = answer(llm, entry.image)
        scheduler.config = replace(scheduler.config, reach=None)
        expected, most = answer(llm, entry.image)
    assert tokens == expected
    assert peak <= most - 3
