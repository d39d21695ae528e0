"""A helper process for tests: does what its request says, up to the worst."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from saccade.helpers.main import AnswerRefused, limit_memory, serve


def answer(body: bytes, fds: Sequence[int]) -> bytes:
    if body == b"spin":
        while True:
            pass
    if body == b"plod":  # 0.3 s of CPU time, in a fourth of a processor
        last = time.process_time() + 0.3
        while time.process_time() < last:
            end = time.process_time() + 0.01
            while time.process_time() < end:
                pass
            time.sleep(0.03)
    if body == b"die":
        os._exit(3)
    if body == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory runs out
    if body == b"oom score":
        return Path("/proc/self/oom_score_adj").read_bytes()
    if body == b"fill":
        return bytes(1 << 30)
    if body == b"refuse":
        raise AnswerRefused(b"no")
    if body == b"fds":
        return b"".join(os.read(fd, 16) for fd in fds)
    if body == b"descriptors":
        return str(len(os.listdir("/proc/self/fd"))).encode()
    return b" ".join((*(text.encode() for text in sys.argv[1:]), body))


if __name__ == "__main__":
    limit_memory(512)
    serve(answer, is_python="python" in sys.argv)
