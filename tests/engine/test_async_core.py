"""The step loop and the forward pass of CUDA devices, against the plain ones: in Triton's interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.kernels.attention.decode import DecodeAttention
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.staging import PinnedStaging
from saccade.types.step import StepPlan
from tests.helpers.engine.async_engine import (
    FEW,
    GREEDY,
    OPTIONS,
    QWEN2_VL,
    answers,
    decoding,
    overlapped,
    prompts,
    short,
)
from tests.helpers.families.families import FAMILIES

pytestmark = pytest.mark.transformers

# All that kernels know: every other family has one of these. The last one's layers are Transformers'.
DECODERS = (
    *("llava", "ministral3", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe", "deepseek_vl_v2", "mllama"),
    "internvl",
)


@pytest.mark.parametrize("name", DECODERS)
def test_kernels_and_launching_ahead_give_the_tokens_of_the_plain_engine(
    name: str, tmp_path: Path, photo: Callable[..., Image.Image]
) -> None:
    folder, given = short(name, tmp_path), prompts(photo, FAMILIES[name].image)[:3]
    ahead, expected = overlapped(folder), answers(LLM(str(folder), **OPTIONS), given, FEW)
    assert answers(ahead, given, FEW) == expected
    from_prefix_cache = answers(ahead, given[1:], replace(FEW, max_tokens=2))
    assert from_prefix_cache == [tokens[:2] for tokens in expected[1:]]


def test_rows_of_padding_may_hold_anything(two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, poisoned = DecodeAttention.__call__, list[int]()

    def leave_padding(self: DecodeAttention, *given: Any) -> torch.Tensor:
        out, contexts = attend(self, *given), given[4]
        out[contexts == 0] = float("nan")
        poisoned.append(int((contexts == 0).sum()))
        return out

    monkeypatch.setattr(DecodeAttention, "__call__", leave_padding)
    given = [{"prompt": text} for text in ("Count to three.", "Five.", "Small things.")]  # in a pass of four
    llm = overlapped(two_layers)
    assert answers(llm, given) == answers(LLM(str(two_layers), **OPTIONS), given)
    assert any(poisoned) and not llm.engine.core.runner.kv.k.isnan().any()


def test_prompts_in_chunks_give_the_same_tokens(two_layers: Path, photo: Callable[..., Image.Image]) -> None:
    given = prompts(photo, QWEN2_VL)
    plain = LLM(str(two_layers), **OPTIONS)
    chunked = overlapped(two_layers, max_num_batched_tokens=24)
    assert answers(chunked, given) == answers(plain, given)


KINDS = [
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.001, "seed": 8},
    {"temperature": 0},
    {"temperature": 2.0, "seed": 9},
]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_drawn_answers_beside_likeliest_ones_are_those_of_the_plain_engine(
    two_layers: Path, logprobs: int | None
) -> None:
    """With log probabilities the host draws, without them the device does, and begins the next before it is seen."""
    given = [{"prompt": text} for text in ("Count to three.", "Five.", "Small things.", "What?")]
    params = [SamplingParams(max_tokens=5, ignore_eos=True, logprobs=logprobs, **kind) for kind in KINDS]
    ahead, plain = overlapped(two_layers), LLM(str(two_layers), **OPTIONS)
    found = [list(out.outputs[0].token_ids) for out in ahead.generate(given, params, use_tqdm=False)]
    assert found == [list(out.outputs[0].token_ids) for out in plain.generate(given, params, use_tqdm=False)]
    greedy = answers(plain, given)
    assert [tokens != likeliest[:5] for tokens, likeliest in zip(found, greedy, strict=True)] == [
        True,
        True,
        False,
        True,
    ]


def test_answers_that_end_at_different_steps_are_those_of_the_plain_engine(two_layers: Path) -> None:
    given = [{"prompt": text} for text in ("Count to three.", "Five.", "A longer text about small things.")]
    plain = LLM(str(two_layers), **OPTIONS)
    whole = answers(plain, given, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    ends = [
        SamplingParams(max_tokens=12, temperature=0, stop_token_ids=[tokens[4 + i]]) for i, tokens in enumerate(whole)
    ]
    ends[2] = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
    llm = overlapped(two_layers)
    for _ in range(2):  # the second time on blocks that the first one left
        found = [list(out.outputs[0].token_ids) for out in llm.generate(given, ends, use_tqdm=False)]
        assert found == [list(out.outputs[0].token_ids) for out in plain.generate(given, ends, use_tqdm=False)]
        llm.engine.core.scheduler.check()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_decoding_is_planned_before_its_tokens_are_known(two_layers: Path, temperature: float) -> None:
    llm = overlapped(two_layers)
    engine = llm.engine
    engine.add_request("a", {"prompt": "Five."}, replace(GREEDY, temperature=temperature))
    under_way = []
    while engine.has_unfinished_requests():
        engine.step()
        under_way.append(len(engine.core.scheduler._plans))
    assert under_way[0] == 1 and llm.stats()["steps"] == GREEDY.max_tokens


def test_blocks_filled_by_steps_planned_ahead_are_found_by_the_next_turn(two_layers: Path) -> None:
    llm = overlapped(two_layers)
    first = llm.generate(
        {"prompt": "Five."}, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True), use_tqdm=False
    )[0]
    again = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    out = llm.generate({"prompt_token_ids": again}, GREEDY, use_tqdm=False)[0]
    assert 0 < len(again) - 2 * llm.engine.limits.block_size <= out.num_cached_tokens


def test_a_request_aborted_while_its_step_runs_leaves_the_others_alone(two_layers: Path) -> None:
    llm = overlapped(two_layers)
    expected = answers(llm, [{"prompt": "Five."}])[0]
    engine = llm.engine
    engine.add_request("gone", {"prompt": "Count to three."}, GREEDY)
    engine.add_request("stays", {"prompt": "Five."}, GREEDY)
    engine.step()
    engine.abort_request("gone")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [list(out.outputs[0].token_ids) for out in outputs if out.finished] == [expected]
    assert not llm.engine.core.has_unfinished()


def test_a_step_that_cannot_be_launched_ends_its_requests_and_the_engine_goes_on(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = overlapped(two_layers)
    expected = answers(llm, [{"prompt": "Five."}])
    launch = llm.engine.core.runner.launch
    calls = []

    def breaks_once(plan: StepPlan) -> Any:
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("the device is on fire")
        return launch(plan)

    monkeypatch.setattr(llm.engine.core.runner, "launch", breaks_once)
    broken = llm.generate([{"prompt": "Count to three."}], GREEDY, use_tqdm=False)[0]
    assert broken.error is not None and broken.error.code == "engine_error"
    assert answers(llm, [{"prompt": "Five."}]) == expected


def test_of_two_blocks_written_to_one_place_of_a_table_the_later_one_counts() -> None:
    tables = BlockTables(2, 4, torch.device("cpu"))
    tables.open("a", [5, 6])
    tables.close("a")
    tables.open("b", [9])
    tables.extend("b", 1, [3])
    tables.flush()
    assert tables.blocks[tables.row("b"), :2].tolist() == [9, 3]


def test_a_block_that_the_device_enters_itself_is_known_and_not_brought_over() -> None:
    tables = BlockTables(1, 4, torch.device("cpu"))
    tables.open("a", [5])
    tables.extend("a", 1, [6])
    tables.set_by_device(tables.row("a"), 1)
    tables.flush()
    assert tables.blocks[0, :2].tolist() == [5, 0]
    assert tables.slots(0, np.array([15, 16, 17]), 16).tolist() == [95, 96, 97]


def test_changes_that_are_more_than_fits_at_a_time_all_reach_the_device() -> None:
    tables, names = BlockTables(40, 4, torch.device("cpu")), [str(number) for number in range(40)]
    for first, name in enumerate(names):
        tables.open(name, range(first, first + 4))
    tables.flush()
    assert [tables.blocks[tables.row(name), 0].item() for name in names] == list(range(40))


def test_what_is_written_for_the_next_step_does_not_reach_the_one_before() -> None:
    staging, first, second = PinnedStaging(4, torch.device("cpu")), torch.zeros(2).int(), torch.zeros(2).int()
    for target, value in ((first, 1), (second, 2)):
        staging.open()[:2] = value
        staging.send(target)
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2]


def test_a_image_that_arrives_while_others_decode_changes_no_answer(
    two_layers: Path, photo: Callable[..., Image.Image]
) -> None:
    given = prompts(photo, QWEN2_VL)
    expected = answers(LLM(str(two_layers), **OPTIONS), given)
    engine, found = overlapped(two_layers).engine, {}
    for number, prompt in enumerate(given):  # each one arrives two steps after the last
        engine.add_request(str(number), prompt, GREEDY)
        for output in [*engine.step(), *engine.step()]:
            found[output.request_id] = list(output.outputs[0].token_ids)
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    engine.core.scheduler.check()
    assert [found[str(number)] for number in range(len(given))] == expected


def test_rows_of_closed_requests_are_given_again() -> None:
    tables = BlockTables(1, 4, torch.device("cpu"))
    for name in ("a", "b", "c"):
        tables.open(name, [1])
        tables.close(name)
    tables.open("d", [2])
    assert tables.row("d") == 0


def test_after_a_flush_the_device_has_the_blocks_of_every_open_request() -> None:
    tables, drawn, held = BlockTables(4, 32, torch.device("cpu")), np.random.default_rng(0), dict[str, list[int]]()
    for step in range(200):
        name = str(drawn.integers(4))
        blocks = drawn.integers(1, 999, drawn.integers(1, 5)).tolist()
        if name in held and (drawn.random() < 0.2 or len(held[name]) > 24):
            tables.close(name)
            del held[name]
        elif name in held and drawn.random() < 0.8:
            tables.extend(name, len(held[name]), blocks)
            if len(blocks) == 1:  # of a decode step, which enters it by itself
                place = tables.row(name), len(held[name])
                tables.set_by_device(*place)
                tables.flush()
                tables.blocks[place] = blocks[0]
            held[name] += blocks
        else:
            tables.open(name, blocks)
            held[name] = blocks
        if step % 3 == 0:
            tables.flush()
            found = {name: tables.blocks[tables.row(name), : len(blocks)].tolist() for name, blocks in held.items()}
            assert found == held


def test_a_image_is_decoded_from_the_moment_its_request_is_added(
    two_layers: Path, photo: Callable[..., Image.Image]
) -> None:
    llm, given = overlapped(two_layers), prompts(photo, QWEN2_VL)
    for number, prompt in enumerate(given):
        llm.engine.add_request(str(number), prompt, FEW)
    assert decoding(llm) == 2


@pytest.mark.parametrize("encoder_cache_gb", [None, 0.0])
def test_a_image_whose_embeddings_or_blocks_are_at_hand_is_not_decoded_when_it_comes_again(
    two_layers: Path, photo: Callable[..., Image.Image], encoder_cache_gb: float | None
) -> None:
    """Without a cache of embeddings its blocks are all that is left of it."""
    text = f"{QWEN2_VL} What is it? A longer text, so that the block with the end of the picture is a full one."
    given = {"prompt": text, "multi_modal_data": {"image": photo(seed=1)}}
    llm = overlapped(two_layers, encoder_cache_gb=encoder_cache_gb)
    answers(llm, [given], FEW)
    llm.engine.add_request("again", given, FEW)
    assert decoding(llm) == 0


def seen_while_made(llm: LLM, prompt: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Pictures under way while the positions of a prompt are counted, which comes last."""
    seen, family = [], type(llm.engine.processor.family)
    positions = family.positions
    with monkeypatch.context() as patch:
        patch.setattr(family, "positions", lambda *given: (seen.append(decoding(llm)), positions(*given))[1])
        answers(llm, [prompt], FEW)
    return seen[0]


@pytest.mark.parametrize("encoder_cache_gb", [None, 0.0])
def test_a_new_image_is_decoded_while_its_prompt_is_made_and_one_that_came_before_is_not(
    two_layers: Path,
    photo: Callable[..., Image.Image],
    monkeypatch: pytest.MonkeyPatch,
    encoder_cache_gb: float | None,
) -> None:
    given = {"prompt": f"{QWEN2_VL} What is it?", "multi_modal_data": {"image": photo(seed=1)}}
    llm = overlapped(two_layers, encoder_cache_gb=encoder_cache_gb)
    assert seen_while_made(llm, given, monkeypatch) == 1
    assert seen_while_made(llm, given, monkeypatch) == 0


def test_a_full_step_is_launched_before_the_other_requests_are_added(
    two_layers: Path, photo: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(photo, QWEN2_VL)
    llm, plain = overlapped(two_layers, max_num_seqs=2), LLM(str(two_layers), **OPTIONS)
    runner, waiting = llm.engine.core.runner, []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda plan: (waiting.append(len(llm.engine._open)), launch(plan))[1])
    assert answers(llm, given, FEW) == answers(plain, given, FEW)
    assert waiting[0] == 2 < len(given)
    llm.engine.core.scheduler.check()


def test_a_step_that_is_not_full_waits_for_the_requests_that_come(two_layers: Path) -> None:
    llm = overlapped(two_layers)
    for name in "abc":
        llm.engine.add_request(name, {"prompt": "Count."}, FEW)
        llm.engine.launch_if_full()
    assert llm.stats()["steps"] == 0
