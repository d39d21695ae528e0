"""What long-running processes do about their memory."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saccade import LLM, SamplingParams
from saccade.engine.core import EngineCore
from saccade.engine.ipc import messages
from saccade.engine.ipc.loop import EngineLoop
from saccade.engine.process_tuning import collect, freeze
from saccade.options.engine import Options, SchedulerConfig
from saccade.types.request import Request
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.scheduling import make_config, make_request
from tests.helpers.fakes.fake_worker import CONFIG, HANG, WorkerRunner
from tests.helpers.servers.serving import until


class _Ring:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


class _Littering(WorkerRunner):
    """Each step leaves a ring."""

    left: weakref.ref[_Ring] | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.left = weakref.ref(_Ring())
        return super().execute(plan)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is collected but by those who ask for it."""
    gc.disable()
    yield
    gc.enable()


def test_what_exists_after_the_start_is_not_looked_through_again() -> None:
    kept = [_Ring() for _ in range(10)]
    freeze()
    try:
        assert gc.get_freeze_count() > 10
        assert not any(thing is kept for thing in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("no_collector")
def test_tidying_frees_what_refers_to_itself() -> None:
    left = weakref.ref(_Ring())
    assert left() is not None
    collect()
    assert left() is None


@pytest.mark.usefixtures("no_collector")
def test_the_weights_and_words_of_an_engine_that_is_let_go_wait_for_no_collection(qwen2_vl_folder: Path) -> None:
    """On a GPU none would come to them: they were there when the engine settled."""
    llm = LLM(str(qwen2_vl_folder), device="cpu", max_model_len=256, kv_cache_gb=0.02, use_tqdm=False)
    llm.generate("Five.", SamplingParams(max_tokens=2), use_tqdm=False)
    left = [weakref.ref(thing) for thing in (llm.engine.core.runner.model, llm.engine.processor.tokenizer)]
    llm.close()
    del llm
    assert [thing() for thing in left] == [None, None]


# 100 MiB are freed, none of it at the end of the heap: between each two pieces lies something that stays.
_HOLES = """
from psutil import Process
from saccade.engine.process_tuning import trim
pieces = [bytes([1]) * size for _ in range(1600) for size in (64 << 10, 1 << 10)]
del pieces[::2]
before = Process().memory_info().rss
trim()
print(before - Process().memory_info().rss)
"""


def test_trimming_gives_back_what_was_freed_between_things_that_stay() -> None:
    """In a process of its own, whose heap has no other holes."""
    done = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 80 << 20


@contextmanager
def _stepping(runner: WorkerRunner, limits: SchedulerConfig, request: Request) -> Iterator[None]:
    """A loop in a thread, which got this request."""
    ours, theirs = socket.socketpair()
    loop = EngineLoop(theirs, lambda: None)
    thread = threading.Thread(target=loop.run, args=(lambda _: EngineCore(limits, runner),))
    thread.start()
    start = messages.start_message(Path("/x"), CONFIG, {}, Options(), None, [], progress=False)
    for message in (start, messages.Submit(messages.pack_requests([request]))):
        ours.sendall(messages.frame(message))
    yield
    ours.sendall(messages.frame(messages.Stop()))
    thread.join(HANG)
    ours.close()
    assert not thread.is_alive()


@pytest.mark.usefixtures("no_collector")
def test_an_engine_without_work_clears_away_what_its_steps_left() -> None:
    limits = make_config()
    runner = _Littering(0.0, config=limits)
    with _stepping(runner, limits, make_request("a", 5, max_tokens=2)):
        assert until(lambda: runner.left is not None, HANG)
        assert until(lambda: runner.left is not None and runner.left() is None, HANG)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine loop did about its memory, in order."""
    done = list[str]()
    monkeypatch.setattr("saccade.engine.ipc.loop.trim", lambda: done.append("trim"))
    monkeypatch.setattr("saccade.engine.ipc.loop.collect", lambda: done.append("rest"))
    return done


def test_an_engine_that_never_rests_gives_memory_back_too(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> None:
    limits = make_config()
    monkeypatch.setattr("saccade.engine.ipc.loop.TRIM_SECONDS", 0.0)
    with _stepping(WorkerRunner(0.0, config=limits), limits, make_request("a", 5, max_tokens=8)):
        assert until(lambda: "rest" in done, HANG)
    assert done.index("rest") >= 8  # once in each step before it


def test_an_engine_at_rest_gives_memory_back_no_more_than_once(
    monkeypatch: pytest.MonkeyPatch, done: list[str]
) -> None:
    limits = make_config()
    monkeypatch.setattr("saccade.engine.ipc.loop.TRIM_SECONDS", 0.2)
    monkeypatch.setattr("saccade.engine.ipc.loop.BEAT_SECONDS", 0.01)
    with _stepping(WorkerRunner(0.0, config=limits), limits, make_request("a", 5, max_tokens=2)):
        assert until(lambda: {"rest", "trim"} <= set(done), HANG)
        time.sleep(0.5)
    assert done[done.index("rest") :].count("trim") <= 1
