"""Every way in which the engine process or its parent can die, hang or be stopped, and what is left then: nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from saccade.engine.core import EngineCore
from saccade.engine.ipc import messages
from saccade.engine.ipc.client import EngineClient, EngineUnavailable
from saccade.engine.ipc.loop import EngineLoop
from saccade.errors import ConfigError
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from tests.helpers.engine.scheduling import make_config, make_request
from tests.helpers.fakes.fake_worker import (
    BREAKS_THE_CORE,
    CONFIG,
    HANG,
    WorkerRunner,
    collect,
    endless,
    fake_client,
    is_running,
    pid_of,
    run,
    run_bounded,
    submit,
    until,
)

ROOT = Path(__file__).parents[3]


async def restarted(client: EngineClient) -> None:
    await until(lambda: client.status().restarts == 1 and client.status().state == "ready")


# --- the worker dies ----------------------------------------------------------------------------------------------


def test_open_streams_fail_when_the_worker_is_killed_and_the_next_request_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(client: EngineClient) -> None:
        stream = await submit(client, endless())
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="send the request again") as caught:
            await collect(stream)
        assert caught.value.retry_after > 0
        await restarted(client)
        assert len(await collect(await submit(client, make_request("next", 3)))) == 3
        assert client.status().last_error == "it was ended by signal 9"
        assert re.search(r"the engine stopped: .*\n.*the engine is back after \d+\.\d s \(restart 1\)", caplog.text)
        assert client.bytes_in_flight == 0

    run(test)


def test_requests_are_refused_while_the_worker_is_started_again() -> None:
    async def test(client: EngineClient) -> None:
        await until(client.stats)
        os.kill(pid_of(client), signal.SIGKILL)
        await until(lambda: client.status().state == "restarting")
        assert not client.stats()  # those of the worker that died would show blocks in use
        with pytest.raises(EngineUnavailable, match="restarting"):
            await submit(client, make_request("a", 3))

    run(test)


def test_a_request_that_waits_for_admission_when_the_worker_dies_is_told() -> None:
    async def test(client: EngineClient) -> None:
        os.kill(pid_of(client), signal.SIGSTOP)
        waiting = asyncio.create_task(submit(client, make_request("a", 3)))
        await asyncio.sleep(0)
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await waiting

    run(test)


def test_a_broken_invariant_ends_the_worker_with_a_sentence_and_a_new_one_comes() -> None:
    async def test(client: EngineClient) -> None:
        stream = await submit(client, make_request("bad", [BREAKS_THE_CORE]))
        with pytest.raises(EngineUnavailable):
            await collect(stream)
        await restarted(client)
        assert client.status().last_error == "it stopped on KeyError; the log has the traceback"

    run(test)


def test_a_hung_worker_is_noticed_and_replaced() -> None:
    async def test(client: EngineClient) -> None:
        hung = pid_of(client)
        stream = await submit(client, endless())
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable):
            await collect(stream)
        await restarted(client)
        assert not is_running(hung)
        assert "no sign of life for 2.0 s" in (client.status().last_error or "")

    run(test, heartbeat_timeout=2.0)


def test_an_idle_worker_is_not_taken_for_a_hung_one() -> None:
    async def test(client: EngineClient) -> None:
        await asyncio.sleep(3.5)
        assert client.status().restarts == 0

    run(test, heartbeat_timeout=3.0)


def test_a_worker_that_cannot_start_says_why() -> None:
    async def body() -> None:
        client = fake_client(options=Options(device="abacus"))
        with pytest.raises(ConfigError, match="no device abacus"):
            await client.start()
        with pytest.raises(EngineUnavailable, match="stopped"):
            await submit(client, make_request("a", 3))

    run_bounded(body())


def test_a_worker_that_dies_before_it_is_ready_is_not_started_for_ever() -> None:
    async def body() -> None:
        client = fake_client(command=(sys.executable, "-c", "raise SystemExit(3)"))
        with pytest.raises(EngineUnavailable, match="did not start: it exited with status 3"):
            await client.start()

    run_bounded(body())


ONCE = """
import pathlib, runpy, sys
flag = pathlib.Path(sys.argv.pop(1))
if flag.exists():
    sys.exit(3)
flag.touch()
runpy.run_module("tests.helpers.fakes.fake_worker", run_name="__main__")
"""


def test_a_worker_that_keeps_dying_is_started_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("saccade.engine.ipc.supervisor.FIRST_BACKOFF", 0.1)
    monkeypatch.setattr("saccade.engine.ipc.supervisor.MAX_BACKOFF", 0.4)

    async def test(client: EngineClient) -> None:
        os.kill(pid_of(client), signal.SIGKILL)
        await until(lambda: client.status().restarts == 4)

    run(test, command=(sys.executable, "-c", ONCE, str(tmp_path / "flag"), "0"))
    assert [record.getMessage()[-5:] for record in caplog.records] == ["0.1 s", "0.2 s", "0.4 s", "0.4 s"]


def test_a_heartbeat_timeout_shorter_than_the_beat_is_refused() -> None:
    with pytest.raises(ConfigError, match="heartbeat_timeout must be"):
        fake_client(heartbeat_timeout=0.1)


def test_a_checkpoint_that_cannot_be_served_is_told_to_the_operator(qwen2_vl_folder: Path) -> None:
    checkpoint = open_checkpoint(str(qwen2_vl_folder))
    largest = Processor(checkpoint, MediaPolicy.of(Options())).largest_item()
    opts = Options(model=str(qwen2_vl_folder), max_model_len=4096, kv_cache_gb=0.0001)

    async def body() -> None:
        client = EngineClient(opts, checkpoint=checkpoint, largest=largest, progress=False)
        with pytest.raises(ConfigError, match="--kv-cache-gb"):
            await client.start()
        assert client.status().state == "stopped"
        await client.stop()

    run_bounded(body())


# --- we stop, or die ----------------------------------------------------------------------------------------------


def test_draining_refuses_new_requests_and_finishes_open_ones() -> None:
    async def test(client: EngineClient) -> None:
        stream = await submit(client, make_request("open", 5, max_tokens=20))
        client.drain()
        with pytest.raises(EngineUnavailable, match="draining"):
            await submit(client, make_request("new", 3))
        assert len(await collect(stream)) == 20
        assert client.status().state == "draining"

    run(test, step_seconds=0.005)


def test_stopping_leaves_no_child_and_tells_open_streams() -> None:
    async def body() -> None:
        client = fake_client()
        await client.start()
        pid, stream = pid_of(client), await submit(client, endless())
        await client.stop()
        assert not is_running(pid)
        assert client.status().state == "stopped"
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await collect(stream)

    run_bounded(body())


def test_a_worker_that_ignores_the_stop_message_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.ipc.process.STOP_SECONDS", 0.2)
    monkeypatch.setattr("saccade.engine.ipc.process.TERM_SECONDS", 0.2)

    async def body() -> None:
        client = fake_client()
        await client.start()
        pid = pid_of(client)
        os.kill(pid, signal.SIGSTOP)  # neither reads messages nor takes SIGTERM
        await client.stop()
        assert not is_running(pid)

    run_bounded(body())


def test_stopping_while_the_worker_loads_leaves_no_child() -> None:
    async def body() -> None:
        client = fake_client()
        starting = asyncio.create_task(client.start())
        await until(lambda: client.status().pid is not None)
        pid = pid_of(client)
        await client.stop()
        assert not is_running(pid)
        starting.cancel()

    run_bounded(body())


PARENT = """
import asyncio
from tests.helpers.fakes.fake_worker import endless, fake_client, pid_of

async def main():
    client = fake_client(0.05)
    await client.start()
    await client.submit([endless()])
    print(pid_of(client), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_worker_dies_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
    deadline = time.monotonic() + HANG
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


def test_ctrl_c_in_the_terminal_does_not_reach_the_worker() -> None:
    async def test(client: EngineClient) -> None:
        assert os.getpgid(pid_of(client)) != os.getpgid(0)

    run(test)


# --- the loop, without a process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1", b"\x00\x00"])
def test_the_worker_gives_up_when_the_other_side_is_gone_or_sends_garbage(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    is_closed = threading.Event()
    EngineLoop(theirs, is_closed.set)
    ours.sendall(sent)
    ours.close()
    assert is_closed.wait(HANG)


def test_a_stop_ends_the_loop_after_what_came_before_it() -> None:
    ours, theirs = socket.socketpair()
    limits = make_config()
    core = EngineCore(limits, WorkerRunner(0.0, config=limits))
    loop = EngineLoop(theirs, lambda: None)
    start = messages.start_message(Path("/x"), CONFIG, {}, Options(), None, [], progress=False)
    for message in (
        start,
        messages.Submit(messages.pack_requests([endless()])),
        messages.Abort("endless"),
        messages.Stop(),
    ):
        ours.sendall(messages.frame(message))
    loop.run(lambda _: core)
    theirs.shutdown(socket.SHUT_WR)
    with ours, ours.makefile("rb") as stream:
        reports = [messages.report_in(body) for body in iter(lambda: messages.read_body(stream), None)]
    assert [type(report) for report in reports[:2]] == [messages.Ready, messages.Accepted]
    assert not core.has_unfinished()
