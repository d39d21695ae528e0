"""Engines that end or are interrupted: what they let go of, and what they say afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.engine.async_core import AsyncEngineCore
from saccade.errors import RequestError
from saccade.media.media_workers import Ticket
from saccade.processor.output import RequestOutputBuilder
from saccade.types.media import MediaItem
from tests.helpers.engine.async_engine import FEW, OPTIONS, QWEN2_VL, answers, decoding, overlapped

pytestmark = pytest.mark.transformers

AFTER_CLOSE: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("a", FEW, use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}], FEW, use_tqdm=False),
    "stats": lambda llm: llm.stats(),
    "add_request": lambda llm: llm.engine.add_request("a", "a", FEW),
    "step": lambda llm: llm.engine.step(),
    "begin": lambda llm: llm.engine.launch_if_full(),
}


# --- closing ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed(two_layers: Path) -> LLM:
    with LLM(str(two_layers), **OPTIONS) as llm:
        llm.engine.add_request("open", "a", FEW)
    return llm


@pytest.mark.parametrize("name", AFTER_CLOSE)
def test_a_closed_engine_says_that_it_is_closed(closed: LLM, name: str) -> None:
    with pytest.raises(RuntimeError, match="the engine was closed"):
        AFTER_CLOSE[name](closed)


def test_an_engine_may_be_closed_again_and_has_no_request_then(closed: LLM) -> None:
    closed.close()
    closed.engine.abort_request("open")
    assert not closed.engine.has_unfinished_requests()


@pytest.mark.parametrize("make", [lambda folder: LLM(str(folder), **OPTIONS), overlapped])
def test_closing_frees_the_weights_though_the_engine_is_still_held(
    two_layers: Path, make: Callable[[Path], LLM]
) -> None:
    llm = make(two_layers)
    answers(llm, [{"prompt": "Count."}], FEW)
    table = weakref.ref(llm.engine.core.runner.model.decoder.table)  # type: ignore[attr-defined]
    llm.close()
    gc.collect()
    assert table() is None


def test_leaving_a_with_block_by_an_error_closes_and_lets_the_error_through(two_layers: Path) -> None:
    with pytest.raises(KeyboardInterrupt), LLM(str(two_layers), **OPTIONS) as llm:
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="the engine was closed"):
        llm.stats()


# --- interrupts ---------------------------------------------------------------------------------------------------


def interrupted(*given: Any) -> Any:
    raise KeyboardInterrupt


def two_open(folder: Path, room: int = 2) -> LLM:
    """Added by hand and not begun; without more room they fill a step."""
    llm = overlapped(folder, max_num_seqs=room)
    for name in "ab":
        llm.engine.add_request(name, {"prompt": f"Count {name}."}, FEW)
    return llm


def is_as_new(llm: LLM) -> bool:
    llm.engine.core.scheduler.check()
    return not llm.engine.has_unfinished_requests() and not llm.engine._awaited and not llm.engine.core.has_unfinished()


def test_an_interrupt_while_a_step_is_begun_leaves_no_request_open(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = two_open(two_layers)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.core.runner, "launch", interrupted)
        llm.engine.launch_if_full()
    assert is_as_new(llm)
    assert answers(llm, [{"prompt": "Count a."}], FEW) == answers(llm, [{"prompt": "Count a."}], FEW)


def test_an_interrupt_while_a_step_under_way_is_waited_for_leaves_no_request_open(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = two_open(two_layers)
    llm.engine.launch_if_full()
    core = llm.engine.core
    assert isinstance(core, AsyncEngineCore) and core._launched
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(core, "_commit", interrupted)
        llm.engine.abort_request("a")
    assert is_as_new(llm)


def test_an_interrupt_while_a_request_is_added_leaves_nothing_of_it_and_the_others_alone(
    two_layers: Path, photo: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = two_open(two_layers, room=4)
    given = {"prompt": f"{QWEN2_VL} What is it?", "multi_modal_data": {"image": photo(seed=1)}}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.core.runner, "prefetch_media", interrupted)
        llm.engine.add_request("c", given, SamplingParams(n=2, max_tokens=4))
    assert list(llm.engine._open) == ["a", "b"] and list(llm.engine.core.scheduler._open) == ["a/0", "b/0"]
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def stopping(llm: LLM) -> SamplingParams:
    """Ends by a stop string, which the core does not see: it is told."""
    text = llm.generate({"prompt": "Count a."}, FEW, use_tqdm=False)[0].outputs[0].text
    return SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, stop=[text[:1]])


def test_an_interrupt_while_a_stop_string_ends_an_answer_leaves_no_request_open(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = overlapped(two_layers)
    core, params = llm.engine.core, stopping(llm)
    llm.engine.add_request("a", {"prompt": "Count a."}, params)
    llm.engine.add_request("b", {"prompt": "A longer one."}, FEW)
    abort = core.abort

    def aborted(request_id: str) -> Any:
        monkeypatch.setattr(core, "_commit", interrupted)
        return abort(request_id)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(core, "abort", aborted)
        for _ in range(8):
            llm.engine.step()
    assert is_as_new(llm)


def test_an_interrupt_while_tokens_are_handed_out_ends_those_whose_tokens_are_lost_and_no_other(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = overlapped(two_layers, max_num_seqs=2)
    for name in "abc":  # the last one waits
        llm.engine.add_request(name, {"prompt": f"Count {name}."}, FEW)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RequestOutputBuilder, "push", interrupted)
        for _ in range(8):
            llm.engine.step()
    assert list(llm.engine._open) == ["c"] and list(llm.engine.core.scheduler._open) == ["c/0"]
    finished = [out for _ in range(12) for out in llm.engine.step() if out.finished]
    assert [len(out.outputs[0].token_ids) for out in finished] == [4] and is_as_new(llm)


# --- pictures of requests that do not come ------------------------------------------------------------------------


def refused(llm: LLM, photo: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch) -> int:
    """A prompt with a picture that is too long. Pictures under way while it was made."""
    seen, prefetch_media = [], llm.engine.core.runner.prefetch_media  # type: ignore[attr-defined]

    def watched(items: list[MediaItem]) -> None:
        prefetch_media(items)
        seen.append(decoding(llm))

    monkeypatch.setattr(llm.engine.core.runner, "prefetch_media", watched)
    given = {"prompt": f"{QWEN2_VL} {'What is it? ' * 400}", "multi_modal_data": {"image": photo(seed=1)}}
    with pytest.raises(RequestError, match="max-model-len"):
        llm.engine.add_request("long", given, FEW)
    return sum(seen)


def test_a_foretold_image_of_a_request_that_is_refused_is_given_up(
    two_layers: Path, photo: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = overlapped(two_layers)
    assert refused(llm, photo, monkeypatch) == 1
    assert decoding(llm) == 0
    llm.engine.core.scheduler.check()


def test_a_image_given_up_while_it_is_decoded_counts_until_it_is_done_and_is_then_forgotten(
    two_layers: Path, photo: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = overlapped(two_layers)
    encoder, go_on, has_begun = llm.engine.core.runner.encoder, threading.Event(), threading.Event()
    prepare, made = encoder._prepare, []

    def slowly(item: MediaItem, ticket: Ticket) -> Any:
        has_begun.set()
        go_on.wait(120)
        prepared = prepare(item, Ticket())  # as one that cannot be ended any more
        made.append(weakref.ref(prepared.patches))
        return prepared

    monkeypatch.setattr(encoder._stage, "_decode", slowly)
    wait_begun = llm.engine.core.release_if_idle
    monkeypatch.setattr(llm.engine.core, "release_if_idle", lambda: (has_begun.wait(120), wait_begun()))
    assert refused(llm, photo, monkeypatch) == 1
    assert decoding(llm) == 0 and len(encoder._stage._leaving) == 1
    go_on.set()
    encoder._stage.close()
    assert not encoder._stage._leaving and made[0]() is None


def test_images_of_the_last_request_are_given_up_when_it_is_aborted_and_those_of_others_are_kept(
    two_layers: Path, photo: Callable[..., Image.Image]
) -> None:
    llm = overlapped(two_layers)
    for seed, name in enumerate("ab"):
        given = {"prompt": f"{QWEN2_VL} What is it?", "multi_modal_data": {"image": photo(seed=seed)}}
        llm.engine.add_request(name, given, FEW)
    counts = [decoding(llm)]
    for name in "ab":
        llm.engine.abort_request(name)
        counts.append(decoding(llm))
    assert counts == [2, 2, 0]


def test_a_image_whose_embeddings_are_at_hand_is_not_decoded_though_many_came_since(
    two_layers: Path, photo: Callable[..., Image.Image]
) -> None:
    llm = overlapped(two_layers)
    given = {"prompt": f"{QWEN2_VL} What is it?", "multi_modal_data": {"image": photo(seed=1)}}
    answers(llm, [given], FEW)
    core, [item] = llm.engine.core, llm.engine.processor.from_prompt(given).items
    for number in range(1000):
        core.prefetch_media([replace(item, key=number.to_bytes(32))])
        core.release_if_idle()
    core.prefetch_media([item])
    assert decoding(llm) == 0
