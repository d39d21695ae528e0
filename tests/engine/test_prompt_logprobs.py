"""Log probabilities of prompts: Transformers' values, however the prompt was computed. The best of several outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from saccade import LLM, RequestOutput, SamplingParams, costs
from saccade.outputs import TokenLogprobs, unpack_prompt_logprobs
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.request_builder import RequestBuilder
from saccade.runner.batch import RequestState
from saccade.runner.prompt_logprobs import prompt_rows, take_prompt_logprobs
from saccade.types.step import Admission, ScheduledWindow
from tests.helpers.engine.async_engine import overlapped
from tests.helpers.engine.reference import Reference
from tests.helpers.engine.scheduling import Rig, make_prompt
from tests.helpers.families import family_qwen3_vl
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT = "The quick brown fox jumps over the lazy dog, and over another one after it."
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_gb": 0.02, "max_model_len": 256, "use_tqdm": False}
CHUNK = 32
ASKED = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_qwen3_vl.build(tmp_path_factory.mktemp("model") / "Tiny-VL", text={"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family_qwen3_vl.reference(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_batched_tokens=CHUNK, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return make_photo(160, 128)


def run(llm: LLM, prompt: Any, params: SamplingParams = ASKED) -> RequestOutput:
    (out,) = llm.generate(prompt, params, use_tqdm=False)
    return out


def entries(out: RequestOutput) -> list[TokenLogprobs]:
    """From the second token on; the first has none."""
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    return [entry for entry in out.prompt_logprobs if entry is not None]


def values(out: RequestOutput) -> Any:
    return np.array([entry.logprob for entry in entries(out)])


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_image", [False, True])
def test_each_prompt_token_has_transformers_log_probability_and_rank(
    llm: LLM, reference: Reference, photo: Image.Image, has_image: bool
) -> None:
    text = f"Look at {IMAGE}, once more: {TEXT}{TEXT}" if has_image else TEXT * 3
    expected = reference.logits(text, [photo] if has_image else []).log_softmax(-1)[:-1]
    out = run(llm, {"prompt": text, "multi_modal_data": {"image": photo} if has_image else {}})
    ids = out.prompt_token_ids
    assert len(ids) > 2 * CHUNK, "several chunks"
    tokens = torch.tensor(ids[1:])
    np.testing.assert_allclose(values(out), expected.gather(-1, tokens[:, None])[:, 0], atol=2e-5)
    best = expected.topk(2)
    for row, (token, entry) in enumerate(zip(ids[1:], entries(out), strict=True)):
        np.testing.assert_allclose([value for _, value in entry.top], best.values[row], atol=2e-5)
        assert next(iter(entry)) == token and len(entry) in (2, 3)
        closest = (expected[row] - expected[row, token]).abs().sort().values[1]
        if closest > 1e-4:  # otherwise rounding decides
            assert entry.rank == int((expected[row] > expected[row, token]).sum()) + 1


def test_a_cached_prefix_is_computed_anew_and_what_was_computed_can_be_found(llm: LLM, photo: Image.Image) -> None:
    prompt = {"prompt": f"{IMAGE}Tell me: {TEXT}", "multi_modal_data": {"image": photo}}
    plain = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    llm.reset_prefix_cache()
    first = run(llm, prompt)
    assert run(llm, prompt, plain).num_cached_tokens >= len(first.prompt_token_ids) - 16
    again = run(llm, prompt)
    assert first.num_cached_tokens == again.num_cached_tokens == 0
    np.testing.assert_allclose(values(again), values(first), atol=1e-6)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids == run(llm, prompt, plain).outputs[0].token_ids
    llm.engine.core.scheduler.check()
    assert llm.stats()["kv"]["used"] == 0


def test_the_first_of_several_outputs_computes_them(llm: LLM) -> None:
    many = SamplingParams(n=3, max_tokens=2, seed=1, prompt_logprobs=0, logprobs=1)
    out = run(llm, TEXT, many)
    np.testing.assert_allclose(values(out), values(run(llm, TEXT)), atol=1e-6)
    assert len(out.outputs) == 3 and all(one.logprobs for one in out.outputs)
    requests = RequestBuilder(frozenset(), 0).build("r", make_prompt([3]), many, 2)
    assert [request.params.prompt_logprobs for request in requests] == [0, None, None]


def test_a_prompt_of_one_token_has_none(llm: LLM) -> None:
    assert run(llm, {"prompt_token_ids": [5]}).prompt_logprobs == [None]
    assert run(llm, {"prompt_token_ids": [5]}, SamplingParams(max_tokens=1)).prompt_logprobs is None


def test_preempted_requests_report_the_same(folder: Path, llm: LLM) -> None:
    prompts = [f"{number} {TEXT}" for number in range(5)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=1)
    text = open_checkpoint(str(folder)).config.text
    gib = 14.5 * costs.kv_bytes_per_block(text, "float32") / costs.GIB
    with LLM(str(folder), **{**OPTIONS, "kv_cache_gb": gib, "max_model_len": 200}, max_num_batched_tokens=CHUNK) as few:
        found = few.generate(prompts, params, use_tqdm=False)
        assert few.stats()["preemptions"] > 0
    for prompt, out in zip(prompts, found, strict=True):
        alone = run(llm, prompt, params)
        np.testing.assert_allclose(values(out), values(alone), atol=1e-5)
        assert out.outputs[0].token_ids == alone.outputs[0].token_ids


def test_one_that_is_preempted_after_its_first_token_finds_its_blocks_again() -> None:
    rig = Rig()
    rig.add("before", 17)
    rig.drain()
    rig.add("asked", 17, max_tokens=9, prompt_logprobs=1)
    assert rig.windows(rig.step()) == {"asked": (0, 17)}
    asked = rig.scheduler._open["asked"]
    assert len(rig.scheduler._kv_cache.find(asked.hashes, asked.num_tokens)) == 4


def test_kernels_of_a_gpu_report_the_same_beside_a_request_that_decodes(
    folder: Path, llm: LLM, photo: Image.Image
) -> None:
    fast = overlapped(folder, max_model_len=256, max_num_batched_tokens=CHUNK)
    plain = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    alone = run(fast, "Count.", plain).outputs[0].token_ids
    prompt = {"prompt": f"See {IMAGE}, a quick brown fox over it", "multi_modal_data": {"image": photo}}
    fast.engine.add_request("plain", {"prompt": "Count."}, plain)
    fast.engine.step()
    fast.engine.step()
    fast.engine.add_request("asked", prompt, ASKED)
    done = {}
    while fast.engine.has_unfinished_requests():
        done |= {out.request_id: out for out in fast.engine.step() if out.finished}
    assert done["plain"].outputs[0].token_ids == alone and done["plain"].prompt_logprobs is None
    expected = run(llm, prompt)
    assert len(expected.prompt_token_ids) > CHUNK
    np.testing.assert_allclose(values(done["asked"]), values(expected), atol=5e-5)
    assert done["asked"].outputs[0].token_ids == expected.outputs[0].token_ids
    fast.engine.core.scheduler.check()


def test_a_placeholder_outside_of_the_vocabulary_is_never_predicted() -> None:
    params = SamplingParams(prompt_logprobs=1)
    (request,) = RequestBuilder(frozenset(), 0).build("r", make_prompt([[1, 7, 2]]), params, 5)
    state = RequestState(Admission(request, (), (0,)))
    hidden = torch.eye(3, 4)
    state.rows = prompt_rows(ScheduledWindow("r", 0, 3, (), True), state, hidden, lambda rows: rows)
    unknown, known = unpack_prompt_logprobs(take_prompt_logprobs(state), 1)
    assert unknown.logprob == -np.inf and unknown.rank == 4 and unknown.top[0][0] == 0
    assert known.logprob == pytest.approx(hidden[1].log_softmax(-1)[2].item()) and known.top[0][0] == 1
    assert not state.needs_rows and not state.rows


# --- the best of several ------------------------------------------------------------------------------------------


def test_the_best_outputs_have_the_highest_mean_log_probability(llm: LLM) -> None:
    given: dict[str, Any] = {"max_tokens": 8, "seed": 3, "temperature": 1.5}
    all_of_them = run(llm, TEXT, SamplingParams(n=5, logprobs=0, **given)).outputs
    best = run(llm, TEXT, SamplingParams(n=2, best_of=5, **given)).outputs
    means = {one.index: (one.cumulative_logprob or 0) / len(one.token_ids) for one in all_of_them}
    first, second = sorted(means, key=lambda index: -means[index])[:2]
    assert [one.token_ids for one in best] == [all_of_them[first].token_ids, all_of_them[second].token_ids]
    assert [one.index for one in best] == [0, 1] and best[0].logprobs is None
    shown = run(llm, TEXT, SamplingParams(n=1, best_of=5, logprobs=1, **given)).outputs
    assert len(shown) == 1 and shown[0].logprobs and shown[0].text == best[0].text
