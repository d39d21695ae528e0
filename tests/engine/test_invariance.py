"""The same tokens come out however the work is cut, cached, batched or interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saccade import LLM, SamplingParams, costs
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.engine.engine_runs import GREEDY, Subject, prompts, run
from tests.helpers.families.families import ModelFamily

pytestmark = pytest.mark.transformers

SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
EACH_KIND = (  # of layers and of towers: every other family runs the same code as one of these
    "llava",  # attention, positions of one axis, pictures of one size
    "qwen2_5_vl",  # positions of three axes, windows in the tower
    "qwen3_vl",  # features of a picture for several layers
    "qwen3_5_moe",  # linear attention, which keeps states, and experts
    "deepseek_vl_v2",  # latent attention, experts, tiles
    "mllama",  # attention to pictures
    "mistral3",  # pictures in rows
    "internvl",  # layers and processor of Transformers
)
of_each_kind = pytest.mark.parametrize("family_name", EACH_KIND, scope="session")


@pytest.fixture(scope="module")
def subject(family: ModelFamily, family_folder: Path) -> Subject:
    return Subject(family_folder, prompts(family.image))


@pytest.fixture(scope="module")
def alone(subject: Subject) -> list[list[int]]:
    """The plain way: one request at a time, whole windows, no cache."""
    return run(subject, together=False, enable_prefix_caching=False, encoder_cache_gb=0.0)


def test_tokens_do_not_depend_on_batches_a_warm_prefix_cache_or_what_was_left_in_the_kv_cache(
    subject: Subject, alone: list[list[int]]
) -> None:
    """Not even on NaN: what one request wrote must never reach another through padding."""
    llm = LLM(model=str(subject.folder), use_tqdm=False, max_model_len=512, kv_cache_gb=0.02, max_pixels=200_000)
    kv = llm.engine.core.runner.kv
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    cold = llm.generate(subject.prompts, GREEDY, use_tqdm=False)
    warm = llm.generate(subject.prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in cold] == [o.outputs[0].token_ids for o in warm] == alone
    long = [out for out in warm if len(out.prompt_token_ids) > 16]  # a block and a token that is always computed
    assert long and all(out.num_cached_tokens > 0 for out in long)
    llm.engine.core.scheduler.check()
    llm.close()


@of_each_kind
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16"),
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 2}, id="two at a time, chunks of 64"),
        pytest.param(
            {"max_num_batched_tokens": 100_000, "enable_prefix_caching": False}, id="unlimited chunks, no prefix cache"
        ),
        pytest.param({"encoder_cache_slots": 290, "max_num_batched_tokens": 40}, id="tiny encoder cache, chunks of 40"),
        pytest.param({"encoder_cache_gb": 0.0, "max_num_batched_tokens": 48}, id="no encoder cache, chunks of 48"),
        pytest.param({"encode_layers_per_step": 1, "max_num_batched_tokens": 32}, id="sliced, chunks of 32"),
        pytest.param({"max_step_ms": 0.001}, id="bounded steps"),
    ],
)
def test_tokens_do_not_depend_on(given: dict[str, Any], subject: Subject, alone: list[list[int]]) -> None:
    assert run(subject, **given) == alone


@of_each_kind
def test_tokens_do_not_depend_on_preemption(subject: Subject) -> None:
    """KV for two long answers at most: the others are thrown out in the middle and come back."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = run(subject, params, together=False, enable_prefix_caching=False, max_pixels=60_000)
    text = open_checkpoint(str(subject.folder)).config.text
    blocks = 14
    gib = (blocks + 0.5) * costs.kv_bytes_per_block(text, "float32") / costs.GIB
    llm = LLM(model=str(subject.folder), use_tqdm=False, kv_cache_gb=gib, max_pixels=60_000)
    asked = subject.prompts
    outs = llm.generate(asked, params, use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    assert [o.outputs[0].token_ids for o in outs] == expected
    llm.engine.core.scheduler.check()
    llm.close()


@of_each_kind
def test_a_seeded_request_gives_the_same_text_whatever_it_is_batched_with(subject: Subject) -> None:
    together = run(subject, SEEDED, max_num_batched_tokens=32)
    one_by_one = run(subject, SEEDED, together=False, enable_prefix_caching=False)
    assert together == one_by_one
