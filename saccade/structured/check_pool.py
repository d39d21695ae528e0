"""Asks processes that can be ended what is wrong with a schema, and remembers what they said. Never imports torch.

Compiling a schema is work that a client can make as large as it likes: it may take for ever, or overflow the stack. A
process that dies of one schema is replaced for the next.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from io import BufferedIOBase

_SECONDS = 30.0  # without an answer. Time of the processor is limited inside: a busy machine refuses no schema
_REMEMBERED = 256  # schemas of one scope: their hashes, and a sentence each
TOO_COMPLEX = "it is too complex to be compiled; make it simpler"


class SchemaChecks:
    """What is wrong with schemas. Each scope has a memory of its own, so that no tenant can tell what others sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._known: dict[str, OrderedDict[bytes, str | None]] = {}

    def problem(self, text: str, scope: str = "") -> str | None:
        """As the end of a sentence; None if the schema can be enforced. Most requests bring one that was seen before.

        TimeoutError is not remembered: the machine may just have been busy.
        """
        digest = hashlib.sha256(text.encode()).digest()
        with self._lock:
            known = self._known.setdefault(scope, OrderedDict())
            if digest in known:
                known.move_to_end(digest)
                return known[digest]
        found = self._ask(text)
        with self._lock:
            known[digest] = found
            while len(known) > _REMEMBERED:
                known.popitem(last=False)
        return found

    def _ask(self, text: str) -> str | None:
        """As many processes as are asked at once, which is for the callers to limit."""
        process = self._taken() or _Process()
        try:
            found = process.ask(text)
        except BaseException:
            process.end()
            raise
        if found is None:
            process.end()
            return TOO_COMPLEX
        with self._lock:
            self._idle.append(process)
        return found or None

    def _taken(self) -> _Process | None:
        with self._lock:
            self._idle = [process for process in self._idle if process.is_ours]
            return self._idle.pop() if self._idle else None

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()


class _Process:
    """One process at the other end of a socket. It ends when that closes, so it never outlives us."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._parent = os.getpid()
        command = [sys.executable, "-m", "saccade.structured.check_process"]
        with theirs:
            end = theirs.fileno()
            self._process = subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.DEVNULL)
        self._answers = self._socket.makefile("rb")

    @property
    def is_ours(self) -> bool:
        """Not of the process that we were forked from."""
        return self._parent == os.getpid()

    def ask(self, text: str) -> str | None:
        """The answer, which may be empty; None if the process died of the question. TimeoutError without an answer."""
        self._socket.settimeout(_SECONDS)
        try:
            self._socket.sendall(framed(text))
            return read_frame(self._answers)
        except ConnectionError:
            return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._socket.close()


def read_frame(stream: BufferedIOBase) -> str | None:
    """Four bytes of length, then text. None when there is no more."""
    size = stream.read(4)
    data = stream.read(int.from_bytes(size)) if len(size) == 4 else b""
    return data.decode() if len(size) == 4 and len(data) == int.from_bytes(size) else None


def framed(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4) + data
