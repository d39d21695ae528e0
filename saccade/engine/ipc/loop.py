"""The engine process: builds a core, warms it up, then steps it for one client until told to stop.

Owns the connection and the step loop. Reads no options and does not import torch itself, so that tests can
run it with a fake core.

    socket ─► reader thread ─► inbox ─► loop: take messages, step, report ─► socket
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import CDLL
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from saccade.engine.core import EngineCore
from saccade.engine.ipc.kv_events import encode_events
from saccade.engine.ipc.messages import (
    Abort,
    Accepted,
    Command,
    Control,
    Controlled,
    Fatal,
    Ready,
    Refused,
    Report,
    Start,
    StepUpdate,
    Stop,
    Submit,
    WireError,
    WorkerPlace,
    command_in,
    frame,
    read_body,
    unpack_requests,
)
from saccade.engine.process_tuning import collect, resident_bytes, trim
from saccade.errors import ConfigError, RequestError
from saccade.scheduler.cache_log import CacheLog
from saccade.scheduler.kv_event_log import KVEventLog
from saccade.types.events import TokenEvent
from saccade.types.request import Request

BEAT_SECONDS = 0.5  # between heartbeats when idle, and between two reports of the counters
TRIM_SECONDS = 60.0  # between two returns of freed memory to the system: later steps fetch some of it again
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("saccade.engine")

Build = Callable[[Start], EngineCore]


class WorkerLoop(ABC):
    """The worker's end of the socket to its supervisor: messages from a reader thread, and replies."""

    def __init__(self, connection: socket.socket, on_close: Callable[[], None]) -> None:
        """`on_close` is called in the reader thread when the client is gone or sends garbage."""
        self._connection = connection
        self._on_close = on_close
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        threading.Thread(target=self._read, name="saccade-reader", daemon=True).start()

    @abstractmethod
    def run(self, build: Callable[[Start], Any]) -> None:
        """Build from the first message, then work until told to stop."""

    def send(self, message: Report) -> None:
        self._connection.sendall(frame(message))

    def _start(self) -> Start | None:
        """The first message; None: it is Stop."""
        start = self._inbox.get()
        if isinstance(start, Stop):
            return None
        if not isinstance(start, Start):
            raise WireError(f"the first message must be Start, not {type(start).__name__}")
        return start

    def _read(self) -> None:
        """Runs in its own thread, so that messages are read and decoded while a step runs."""
        try:
            with self._connection.makefile("rb") as stream:
                while self._receive(stream):
                    pass
        except Exception as error:  # garbage, a broken socket, no memory: the connection is useless
            logger.error("the connection to the server broke: %s", error)
        self._on_close()

    def _receive(self, stream: BinaryIO) -> bool:
        """One message; False at the end. A function of its own: no local holds the message while waiting."""
        body = read_body(stream)
        if body is None:
            return False
        self._inbox.put(command_in(body))
        return True


class EngineLoop(WorkerLoop):
    """Steps one core for the other end of one socket."""

    def __init__(self, connection: socket.socket, on_close: Callable[[], None]) -> None:
        self._ended: list[TokenEvent] = []  # terminal events of aborted requests, not yet sent
        self._stats_due = 0.0
        self._cache_log: CacheLog | None = None  # None: the only engine, nothing is routed
        self._kv_events: KVEventLog | None = None
        self._is_tidy = self._is_trimmed = True
        self._trim_due = time.monotonic() + TRIM_SECONDS
        super().__init__(connection, on_close)

    def run(self, build: Build) -> None:
        start = self._start()
        if start is None:
            return
        core = build(start)
        try:
            if start.logs_kv_events:  # the blocks of the warm-up stay cached
                self._kv_events = core.scheduler.log_kv_events()
            warm_up(core, unpack_requests(start.warmup))
            if not start.replica.is_alone:
                self._cache_log = core.scheduler.log_caches()
            self.send(Ready(core.limits, core.reasons, place_on(core.device)))
            while self._take_messages(core):
                self._step(core)
        finally:
            core.close()

    def _step(self, core: EngineCore) -> None:
        if core.has_unfinished():
            self._is_tidy = self._is_trimmed = False
            self._report(core, core.step())
        else:
            self._report(core, [])
            if not self._is_tidy:  # idle: a garbage collection delays no request
                collect()
                self._is_tidy = True
        now = time.monotonic()
        if not self._is_trimmed and now >= self._trim_due:  # not only when idle: under load it never is
            trim()
            self._is_trimmed = True
            self._trim_due = now + TRIM_SECONDS

    # --- incoming -------------------------------------------------------------------------------------------

    def _take_messages(self, core: EngineCore) -> bool:
        """Handle what has arrived; block, for a heartbeat, only when idle. False: it is time to stop."""
        try:
            message = self._inbox.get(block=not core.has_unfinished(), timeout=BEAT_SECONDS)
            while not isinstance(message, Stop):
                self._take(core, message)
                message = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _take(self, core: EngineCore, message: Command) -> None:
        if isinstance(message, Submit):
            requests = unpack_requests(message.requests)
            first = requests[0].request_id
            try:
                core.add_all(requests)
            except RequestError as error:
                self.send(Refused(first, error))
            else:
                self.send(Accepted(first))
        elif isinstance(message, Abort):
            event = core.abort(message.request_id)
            self._ended += [event] if event else []
        elif isinstance(message, Control):
            self.send(self._control(core, message))

    def _control(self, core: EngineCore, message: Control) -> Controlled:
        result: str | bool | None = None
        try:
            if message.action == "reset_prefix_cache":
                result = core.reset_prefix_cache()
            elif core.profiler is None:
                raise ConfigError("this engine has no profiler")
            elif message.action == "start_profile":
                core.profiler.start(message.prefix)
            else:
                result = str(core.profiler.stop())
        except (ConfigError, OSError) as error:
            return Controlled(message.number, None, str(error))
        return Controlled(message.number, result)

    # --- outgoing -------------------------------------------------------------------------------------------

    def _report(self, core: EngineCore, events: list[TokenEvent]) -> None:
        events = self._ended + events
        self._ended = []
        now = time.monotonic()
        stats = None
        if now >= self._stats_due or any(event.finish_reason for event in events):
            stats = {**core.stats(), "resident_bytes": resident_bytes()}
            self._stats_due = now + BEAT_SECONDS
        cache = self._cache_log.take() if self._cache_log is not None else None
        kv_events = b""
        if self._kv_events is not None:
            kv_events = encode_events(self._kv_events.take(), core.limits.block_size)
        self.send(StepUpdate(events, stats, cache, kv_events))


def place_on(device: str) -> WorkerPlace:
    return WorkerPlace(socket.gethostname(), os.getpid(), device)


def warm_up(core: EngineCore, requests: list[Request]) -> None:
    """Run these to their end, so that lazy set-up delays no client. One that fails is only a warning."""
    for request in requests:
        try:
            core.add(request)
        except RequestError as error:
            logger.warning("warm-up request %s was refused: %s", request.request_id, error)
    while core.has_unfinished():
        for event in core.step():
            if event.error is not None:
                logger.warning("warm-up request %s failed: %s", event.request_id, event.error)


# --- the process --------------------------------------------------------------------------------------------


def run_process(
    fd: int, build: Callable[[Start], Any], make_loop: Callable[..., WorkerLoop] = EngineLoop
) -> int:
    """Serve the inherited socket until the client stops us or is gone; returns the exit status."""
    end_with_parent()
    os.set_inheritable(fd, False)  # a child process that held it would hide our exit from the client
    with socket.socket(fileno=fd) as connection:
        return serve_connection(connection, build, make_loop)


def end_with_parent() -> None:
    if sys.platform == "linux":  # elsewhere the closed socket ends us
        CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve_connection(
    connection: socket.socket,
    build: Callable[[Start], Any],
    make_loop: Callable[..., WorkerLoop] = EngineLoop,
) -> int:
    """Ends the process when the client is gone: the rest of a step is of no use to it."""
    loop = make_loop(connection, on_close=lambda: os._exit(0))
    try:
        loop.run(build)
    except (ConnectionError, TimeoutError):
        return 0  # the client is gone
    except Exception as error:
        _tell_fatal(loop, error)
        return 1
    return 0


def _tell_fatal(loop: WorkerLoop, error: Exception) -> None:
    """The client gets one sentence; paths and library text stay in the log."""
    is_config = isinstance(error, ConfigError)
    if not is_config:
        logger.error("the engine cannot go on", exc_info=error)
    reason = str(error) if is_config else f"it stopped on {type(error).__name__}; the log has the traceback"
    try:
        loop.send(Fatal(reason, is_config))
    except OSError:
        logger.error("the server is gone and cannot be told")
