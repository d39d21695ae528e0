"""Prompt tokens that ride along with a decode step: the same answers, and only where nobody waits for a first token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.runner.cuda.graph_sizes import MixedSize, mixed_sizes
from saccade.runner.cuda.mixed_graphs import MixedGraphs
from saccade.runner.forward import Sampled
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.async_engine import OPTIONS, TWO_LAYERS, overlapped, prompts
from tests.helpers.families.families import FAMILIES

pytestmark = pytest.mark.transformers

SIZE = MixedSize(32, 4)
SHORT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text": TWO_LAYERS},
    "qwen3_vl": {"text": TWO_LAYERS},  # whose rows are wider where an image is spliced in
    "deepseek_vl_v2": {**TWO_LAYERS, "first_k_dense_replace": 2},  # MLA; without experts
    "mllama": {"text": {**TWO_LAYERS, "cross_attention_layers": [1]}},
    "internvl": {},  # Transformers' layers
}
LONG = "A longer text about many small things that has several blocks of tokens in it, at least three."
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=5, temperature=1.2, top_k=50, seed=3, ignore_eos=True)


def riding(folder: Path, size: MixedSize = SIZE, max_tokens: int = 24) -> tuple[LLM, list[tuple[int, int]]]:
    """An engine whose prompts come in small parts, and what rode along: tokens, and the requests that decoded."""
    llm, rode = overlapped(folder, max_num_batched_tokens=max_tokens), list[tuple[int, int]]()
    llm.engine.core.scheduler.policy.fuses = lambda *_: True  # without times of a device: all that can be fused is
    mixed: MixedGraphs = llm.engine.core.runner.forward._mixed_graphs
    mixed.prepare(size)
    run = mixed.run

    def noted(size: MixedSize, windows: Any, splice: Any, rows: Any) -> Any:
        rode.append((sum(len(window.tokens) for window in windows), len(rows.tokens)))
        return run(size, windows, splice, rows)

    mixed.run = noted  # type: ignore[method-assign]
    return llm, rode


def one_by_one(llm: LLM, given: list[dict[str, Any]], params: SamplingParams) -> list[list[int]]:
    """Answers to requests of which each comes two steps after the last."""
    engine, found = llm.engine, dict[str, list[int]]()
    for number, prompt in enumerate(given):
        engine.add_request(str(number), prompt, params)
        for output in [*engine.step(), *engine.step()]:
            found[output.request_id] = list(output.outputs[0].token_ids)
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    engine.core.scheduler.check()
    return [found[str(number)] for number in range(len(given))]


@pytest.mark.parametrize("name", SHORT)
def test_prompts_that_ride_along_change_no_answer(name: str, tmp_path: Path, photo: Callable[..., Image.Image]) -> None:
    family = FAMILIES[name]
    folder, given = family.build(tmp_path, **SHORT[name]), prompts(photo, family.image)[:3]
    if name == "deepseek_vl_v2":  # whose images are many tokens
        given = given[::2]
    llm, rode = riding(folder, max_tokens=4 if name == "mllama" else 24)  # of a step: its prompts are short
    assert one_by_one(llm, given, GREEDY) == one_by_one(LLM(str(folder), **OPTIONS), given, GREEDY)
    most = 1 if name in ("mllama", "deepseek_vl_v2") else 2  # requests that decode meanwhile
    assert any(tokens > 1 and rows == most for tokens, rows in rode)


TEXTS = [{"prompt": "Count to three."}, {"prompt": LONG}]


def test_drawn_tokens_are_the_same_whether_prompts_ride_along_or_not(two_layers: Path) -> None:
    llm, rode = riding(two_layers)
    assert one_by_one(llm, TEXTS, DRAWN) == one_by_one(LLM(str(two_layers), **OPTIONS), TEXTS, DRAWN)
    assert rode


def test_what_fits_no_pass_for_both_goes_by_itself(two_layers: Path) -> None:
    llm, rode = riding(two_layers, MixedSize(4, 4))
    assert one_by_one(llm, TEXTS, GREEDY) == one_by_one(LLM(str(two_layers), **OPTIONS), TEXTS, GREEDY)
    assert not rode


def test_the_result_of_what_rode_along_is_there_before_the_decode_step_is_waited_for(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, rode = riding(two_layers)
    runner, waited, early = llm.engine.core.runner, list[bool](), list[StepResult]()
    mixed, launch_both = runner.forward.mixed, runner.launch_both

    def waiting(*given: Any) -> Sampled:
        sampled = mixed(*given)
        return lambda: (waited.append(True), sampled())[1]

    def asked_at_once(beside: StepPlan, ahead: StepPlan) -> Any:
        waited.clear()
        collects = launch_both(beside, ahead)
        if beside.fuse_with_next:
            early.append(collects[0]())
        assert not waited
        return collects

    monkeypatch.setattr(runner.forward, "mixed", waiting)
    monkeypatch.setattr(runner, "launch_both", asked_at_once)
    one_by_one(llm, TEXTS, GREEDY)
    assert len(early) == len(rode) > 0 and not any(result.samples for result in early)


def test_recorded_sizes_hold_what_a_step_may_have_and_no_more() -> None:
    assert mixed_sizes(200, 20) == [(248, 8), (236, 20), (120, 8), (108, 20)]
    assert max(size.rows for size in mixed_sizes(8192, 256)) == 128
    assert {sum(size) % 128 for size in mixed_sizes(8192, 256)} == {0}


def test_sizes_that_no_step_can_fill_are_not_recorded() -> None:
    assert mixed_sizes(8192, 1) == [], "where one request runs, nothing is beside it"
    assert mixed_sizes(64, 256) == [(192, 64), (120, 8), (96, 32)], "65 answers leave no token of 64"
