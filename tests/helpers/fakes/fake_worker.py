"""An engine process with a fake runner, and a client for it: starts in a moment, needs no torch.

`python -m tests.helpers.fakes.fake_worker STEP_SECONDS FD`. Some prompts, told by their first token, make it misbehave.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from saccade.checkpoint.config import model_config
from saccade.engine.core import EngineCore
from saccade.engine.ipc.client import EngineClient, RequestStream
from saccade.engine.ipc.loop import run_process, serve_connection
from saccade.engine.ipc.messages import Start
from saccade.engine.ipc.process import EngineProcess
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.types.events import TokenEvent
from saccade.types.request import Request
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.scheduling import FakeRunner, make_config, make_request

BREAKS_THE_STEP, BREAKS_THE_CORE = 66_000, 77_000  # first tokens
HANGS_REPLICA = 88_000  # plus its index: first token of a prompt whose first step never ends there
STEP_SECONDS = 0.002  # where no command line says it
HANG = 120.0  # seconds after which a test is given up
SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
CONFIG = model_config({"model_type": "fake", "vocab_size": 9, "max_position_embeddings": 64, **SHAPE})
NO_FILES = SimpleNamespace(path=Path("/nowhere"), config=CONFIG, image_processor={})


# --- the worker ---------------------------------------------------------------------------------------------------


class WorkerRunner(FakeRunner):
    def __init__(self, step_seconds: float, index: int = 0, **how: Any) -> None:
        super().__init__(**how)
        self.step_seconds = step_seconds
        self.index = index

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self.step_seconds)
        first = {admission.request.prompt.token_ids[0] for admission in plan.admitted}
        if HANGS_REPLICA + self.index in first:
            time.sleep(10 * HANG)
        if BREAKS_THE_STEP in first:
            raise RuntimeError("the step broke")
        result = super().execute(plan)
        return StepResult({}) if BREAKS_THE_CORE in first else result  # a sample is missing: commit cannot go on

    def stats(self) -> dict[str, Any]:
        return {"encoder": {"encoded": len(self.encoded)}}

    def close(self) -> None:
        pass


def build(start: Start) -> EngineCore:
    if start.options.device not in ("auto", "cpu"):
        raise ConfigError(f"the fake engine has no device {start.options.device}")
    limits = make_config(max_waiting=start.options.max_waiting, max_num_seqs=min(start.options.max_num_seqs, 8))
    seconds = float(sys.argv[1]) if __name__ == "__main__" else STEP_SECONDS
    runner = WorkerRunner(seconds, start.replica.index, config=limits)
    return EngineCore(limits, runner, reasons=["a fake engine"])


class RayWorker:
    def serve(self, connection: socket.socket) -> None:
        serve_connection(connection, build)


# --- the client ---------------------------------------------------------------------------------------------------


def fake_client(
    step_seconds: float = 0.0, options: Options | None = None, command: Sequence[str] = (), **how: Any
) -> EngineClient:
    command = command or (sys.executable, "-m", "tests.helpers.fakes.fake_worker", str(step_seconds))
    how = {"checkpoint": NO_FILES, "launch": partial(EngineProcess.spawn, command), **how}
    return EngineClient(options or Options(), largest=None, **how)


@asynccontextmanager
async def started(client: EngineClient) -> AsyncIterator[EngineClient]:
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


def run(test: Callable[[EngineClient], Awaitable[None]], *, loop_factory: Any = None, **how: Any) -> None:
    """Run a test against a started client with a fake worker, and leave no process behind."""

    async def body() -> None:
        async with started(fake_client(**how)) as client:
            await test(client)

    run_bounded(body(), loop_factory)


def run_bounded(body: Coroutine[Any, Any, None], loop_factory: Any = None, seconds: float = HANG) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(body, seconds))


def run_replicas(
    test: Callable[[ReplicaSet], Awaitable[None]],
    count: int = 2,
    seconds: float = HANG,
    bounds: tuple[int, int] | None = None,
    **how: Any,
) -> None:
    """The same against several fake workers as one engine. Nothing may be counted as open at the end."""

    async def body() -> None:
        replicas = ReplicaSet(partial(fake_client, **how), count, bounds or (count, count))
        pids: list[int] = []
        try:
            await replicas.start()
            pids = pids_of(replicas)
            await test(replicas)
        finally:
            pids += pids_of(replicas)
            await replicas.stop()
        replicas.check()
        assert replicas.bytes_in_flight == 0
        assert not any(is_running(pid) for pid in pids)

    run_bounded(body(), seconds=seconds)


def pids_of(replicas: ReplicaSet) -> list[int]:
    return [view.status.pid for view in replicas.replicas() if view.status.pid is not None]


async def submit(client: EngineClient | ReplicaSet, request: Request) -> RequestStream:
    """One request by itself."""
    (stream,) = await client.submit([request])
    return stream


async def collect(stream: RequestStream) -> list[TokenEvent]:
    return [event async for events in stream for event in events]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def endless(request_id: str = "endless") -> Request:
    return make_request(request_id, 5, max_tokens=9_000)


def pid_of(client: EngineClient) -> int:
    pid = client.status().pid
    assert pid is not None
    return pid


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip() != "" and not state.startswith("Z")


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # failures are provoked here; their tracebacks would only confuse
    sys.exit(run_process(int(sys.argv[2]), build))
