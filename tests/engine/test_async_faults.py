"""Steps under way while something else happens: an id that comes again, an abort, an interrupt, a device that dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.engine.async_core import AsyncEngineCore
from saccade.engine.core import EngineCore
from saccade.types.events import TokenEvent
from saccade.types.media import Key
from saccade.types.step import MediaTimes, StepPlan, StepResult
from tests.helpers.engine.async_engine import GREEDY, OPTIONS, QWEN2_VL, overlapped
from tests.helpers.engine.async_scheduling import PACE
from tests.helpers.engine.scheduling import EOS, FakeImage, make_config, make_request
from tests.helpers.kernels.launching import Launching, drained

pytestmark = pytest.mark.transformers


def make_core(kind: type[EngineCore] = AsyncEngineCore, **runner: Any) -> EngineCore:
    config = make_config()
    return kind(config, Launching(config, **runner))


def tokens(events: list[TokenEvent]) -> list[int | None]:
    return [event.token_id for event in events]


def test_an_id_may_come_again_while_a_step_for_its_first_request_runs() -> None:
    core = make_core(next_token=lambda name, position: EOS if position == 7 else 1_000 + position)
    core.add(make_request("a", 5, max_tokens=20, temperature=0))
    events: list[TokenEvent] = []
    while not any(event.finish_reason for event in events):
        events += core.step()
    assert core.has_unfinished()  # a token that nobody wants is under way
    core.add(make_request("a", 8, max_tokens=3, temperature=0, first_token=500))
    assert tokens(drained(core)) == [1_008, 1_009, 1_010]


def test_last_tokens_do_not_wait_for_the_launch_of_whole_images() -> None:
    config = make_config(latency=PACE)
    core = AsyncEngineCore(config, runner := Launching(config, layers=40))
    core.add(make_request("a", 5, max_tokens=4, temperature=0))
    events = core.step() + core.step()
    core.add(make_request("p", FakeImage("p", 4), max_tokens=1, temperature=0))
    while not any(event.finish_reason for event in events):
        events += core.step()
    assert runner.flying and not runner.encoded
    assert [event.request_id for event in drained(core)] == ["p"]


class Watching(Launching):
    """Says when somebody asks how long pictures took."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_asked = 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return replace(result, encoded=Asked(self, result.encoded))


class Asked(dict[Key, MediaTimes]):
    def __init__(self, runner: Watching, times: Mapping[Key, MediaTimes]) -> None:
        super().__init__(times)
        self.runner = runner

    def __getitem__(self, key: Key) -> MediaTimes:
        if self.runner.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.runner.num_asked += 1
        return super().__getitem__(key)


def beside_an_answer(layers: int = 4) -> tuple[AsyncEngineCore, Watching]:
    """A picture comes while an answer is under way."""
    config = make_config(latency=PACE)
    core = AsyncEngineCore(config, runner := Watching(config, layers=layers))
    core.add(make_request("a", 5, max_tokens=20, temperature=0))
    core.step()
    core.step()
    core.add(make_request("p", FakeImage("p", 4), max_tokens=3, temperature=0))
    return core, runner


def test_a_step_that_breaks_beside_images_leaves_nothing_under_way() -> None:
    core, runner = beside_an_answer(layers=40)
    core.step()
    runner.is_dead = True
    with pytest.raises(RuntimeError):
        core.step()
    assert not core._launched


def test_how_long_a_image_took_is_asked_when_its_request_ends() -> None:
    core, runner = beside_an_answer()
    events: list[TokenEvent] = []
    while not any(event.request_id == "p" for event in events):
        events += core.step()
        assert not runner.num_asked or any(event.finish_reason for event in events)
    ended = [event for event in events + drained(core) if event.finish_reason and event.request_id == "p"]
    assert ended[0].usage is not None and (ended[0].usage.decode_ms, ended[0].usage.encode_ms) == (2.0, 3.0)
    assert runner.num_asked == 1


def test_a_device_that_died_is_not_asked_how_long_images_took() -> None:
    config = make_config()
    core = AsyncEngineCore(config, runner := Watching(config))
    for name in "abcd":
        core.add(make_request(name, FakeImage(name, 4), max_tokens=9, temperature=0))
    for _ in range(3):
        core.step()
    runner.is_dead = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        drained(core)
    assert not core.has_unfinished()
    core.scheduler.check()


def test_nothing_is_told_of_a_request_after_its_abort() -> None:
    core = make_core()
    for name in ("gone", "stays"):
        core.add(make_request(name, 5, max_tokens=9, temperature=0))
    for _ in range(3):
        core.step()
    ended = core.abort("gone")
    assert ended is not None and ended.finish_reason == "abort"
    assert {event.request_id for event in drained(core)} == {"stays"}


def test_an_abort_returns_the_last_event_of_a_request_that_ends_with_the_step_under_way() -> None:
    core = make_core()
    core.add(make_request("a", 5, max_tokens=3, temperature=0))
    core.step()
    events = core.step() + core.step()
    assert len(events) == 2 and core.has_unfinished()
    ended = core.abort("a")
    assert ended is not None and ended.finish_reason == "length" and ended.usage is not None
    assert not drained(core)


def test_the_plain_loop_leaves_no_blocks_to_be_hashed_later() -> None:
    core = make_core(EngineCore)
    core.add(make_request("a", 40, max_tokens=20))
    for _ in range(9):
        core.step()
        assert not core.scheduler._kv_cache.prefixes.has_pending


@pytest.mark.parametrize("kind", [EngineCore, AsyncEngineCore])
def test_a_core_whose_runner_cannot_go_on_says_so_and_keeps_nothing(kind: type[EngineCore]) -> None:
    core = make_core(kind)
    core.add(make_request("a", 5, max_tokens=9, temperature=0))
    core.step()
    core.runner.is_dead = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        drained(core)
    assert not core.has_unfinished()


@pytest.mark.parametrize("moment", ["schedule", "schedule_async_decode", "schedule_async_prefill"])
def test_an_interrupt_while_a_step_is_planned_leaves_an_engine_that_works(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    plan = getattr(core.scheduler, moment)

    def interrupted(*now: float, **how: bool) -> None:
        plan(*now, **how)
        raise KeyboardInterrupt

    core.add(make_request("a", 5, max_tokens=9, temperature=0))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(core.scheduler, moment, interrupted)
        drained(core)
    core.add(make_request("b", 5, max_tokens=4, temperature=0))
    assert tokens(drained(core)) == [1_005, 1_006, 1_007, 1_008]


def test_a_stop_string_ends_each_of_several_answers_where_it_stands(two_layers: Path) -> None:
    def ending(llm: LLM, **how: Any) -> list[tuple[list[int], bool]]:
        params = SamplingParams(temperature=0, ignore_eos=True, **how)
        out = llm.generate({"prompt": "Count to three."}, params, use_tqdm=False)[0]
        assert out.bill is not None
        return [(list(answer.token_ids), "total" in out.bill.times_ms) for answer in out.outputs]

    plain, ahead = LLM(str(two_layers), **OPTIONS), overlapped(two_layers, max_num_seqs=1)
    whole, _ = ending(plain, max_tokens=8)[0]
    texts = [plain.engine.processor.tokenizer.decode([token]) for token in whole]
    stop = next(text for text in texts[1:] if text.strip())
    for max_tokens in (texts.index(stop) + 2, 8):  # the step under way ends the request, or goes on
        how: dict[str, Any] = {"max_tokens": max_tokens, "n": 2, "stop": [stop]}
        assert ending(ahead, **how) == ending(plain, **how)


def test_a_image_that_was_decoded_ahead_is_decoded_once(
    two_layers: Path, photo: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = overlapped(two_layers, max_num_seqs=1)
    encoder, decoded = llm.engine.core.runner.encoder, []
    prepare = encoder._prepare
    monkeypatch.setattr(
        encoder._stage, "_decode", lambda item, *how: (decoded.append(item.key), prepare(item, *how))[1]
    )
    prompt = f"{QWEN2_VL} What is it?"
    given = [{"prompt": prompt, "multi_modal_data": {"image": photo(seed=seed)}} for seed in (1, 2)]
    llm.generate(given, GREEDY, use_tqdm=False)
    assert len(decoded) == len(set(decoded)) == 2
