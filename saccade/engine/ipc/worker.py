"""The main of the engine process: `python -m saccade.engine.ipc.worker FD`, started by `client`.

FD is an inherited socket; options and checkpoint arrive over it. Nothing else is read from the command line.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # what is imported stays: a search for garbage among it takes an eighth of the start

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saccade.engine.build import build_core
from saccade.engine.core import EngineCore
from saccade.engine.encoders.socket_channel import SocketChannel
from saccade.engine.ipc.loop import run_process
from saccade.engine.ipc.messages import Start, config_of
from saccade.engine.process_tuning import freeze
from saccade.util.logs import set_up_worker


def build(start: Start, connect: Callable[[str, int], Any] = SocketChannel) -> EngineCore:
    """`connect` opens the channel to an encoder worker."""
    files = (Path(start.path), config_of(start), start.image_processor)
    if not start.replica.is_alone:
        set_up_worker(f"engine {start.replica.index}")
    core = build_core(
        *files,
        start.options,
        start.largest,
        progress=start.progress,
        replica=start.replica,
        connect=connect,
    )
    freeze()
    return core


def main() -> int:
    gc.freeze()
    gc.enable()
    set_up_worker("engine")
    return run_process(int(sys.argv[1]), build)


if __name__ == "__main__":
    sys.exit(main())
