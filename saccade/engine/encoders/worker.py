"""The main of an encoder worker: `python -m saccade.engine.encoders.worker FD`, started by `encoder_set`.

FD is a socket to the front door, over which it is started, watched and stopped like an engine. Engines
connect to the address that the first message names.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # what is imported stays: a search for garbage among it takes an eighth of the start

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from time import monotonic
from typing import Protocol

from saccade.engine.encoders.encoder_core import EncoderCore
from saccade.engine.encoders.socket_server import SocketServer
from saccade.engine.ipc.loop import BEAT_SECONDS, WorkerLoop, place_on, run_process
from saccade.engine.ipc.messages import Ready, Start, StepUpdate, Stop, config_of
from saccade.engine.process_tuning import freeze
from saccade.runner.build_encoder import build_encoder, plan_encoder
from saccade.runner.replica_placement import device_label, place
from saccade.util.logs import set_up_worker


class Published(Protocol):
    """A core that engines can reach."""

    def close(self) -> None: ...


class EncoderLoop(WorkerLoop):
    """Steps one encoder core; publishes it to engines from the moment it is warm."""

    def __init__(
        self,
        connection: socket.socket,
        on_close: Callable[[], None],
        publish: Callable[[EncoderCore, str], Published] = SocketServer,
    ) -> None:
        self._publish = publish
        super().__init__(connection, on_close)

    def run(self, build: Callable[[Start], EncoderCore]) -> None:
        start = self._start()
        if start is None:
            return
        core = build(start)
        assert start.replica.encoder is not None
        published = self._publish(core, start.replica.encoders[start.replica.encoder])
        try:
            self.send(Ready(None, core.reasons, place_on(device_label(core.device))))
            due = 0.0
            while not self._is_stopped():
                core.step()
                if monotonic() >= due:
                    due = monotonic() + BEAT_SECONDS
                    self.send(StepUpdate([], core.stats()))
        finally:
            published.close()
            core.close()

    def _is_stopped(self) -> bool:
        try:
            return isinstance(self._inbox.get_nowait(), Stop)
        except Empty:
            return False


def build(start: Start) -> EncoderCore:
    index = start.replica.encoder
    set_up_worker(f"encoder {index}")
    config = config_of(start)
    options = place(start.options, start.replica).options
    plan = plan_encoder(options, config, start.largest)
    assert start.largest is not None
    files = (Path(start.path), config, start.image_processor)
    encoder, seconds = build_encoder(*files, options, plan, start.largest, progress=start.progress)
    freeze()
    part = "the whole model, which encoding reads" if plan.is_whole else "the vision tower"
    reason = (
        f"encoder {index}: {part} on {plan.device}, {str(plan.dtype).removeprefix('torch.')}, "
        f"{1 / max(seconds, 1e-9):.0f} patches a second"
    )
    return EncoderCore(encoder, seconds, (reason,), plan.device)


def main() -> int:
    gc.freeze()
    gc.enable()
    return run_process(int(sys.argv[1]), build, EncoderLoop)


if __name__ == "__main__":
    sys.exit(main())
