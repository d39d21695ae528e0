"""Structured output on the server's side: JSON schemas and Lark grammars that the engine can enforce.

They are checked in processes (`schema_validation_worker`) that can be ended, since a client can
make one arbitrarily costly. Results are cached per `scope` (tenant): no tenant can tell what others sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from io import BufferedIOBase
from typing import Any

from saccade.errors import RequestError, quoted
from saccade.structured.schema import is_schema, unavailable

MAX_SCHEMA_BYTES = 256 << 10
ANY_OBJECT = '{"type":"object"}'
_SECONDS = 30.0  # until a process counts as hung; CPU time is limited inside
_MAX_CACHED = 256  # results of one scope: a hash and a sentence each
EBNF_MARK = "\0ebnf\0"  # before a text that a process converts, and before the converted one
TOO_COMPLEX = "it is too complex to be compiled; make it simpler"


def check_schema(schema: Any, *, param: str = "response_format", scope: str = "") -> str:
    """The schema as text. RequestError if the engine cannot enforce it."""
    _check_available(param)
    text = _as_text(schema, param)
    found = _problem(text, scope) if text != ANY_OBJECT else None
    if found is not None:
        raise _refused(f"the JSON schema cannot be used: {found}", param)
    return text


def check_structured(text: str) -> None:
    """Check `SamplingParams.structured` of a Python caller."""
    if is_schema(text):
        check_schema_text(text, param="structured")
    else:
        check_grammar(text, "grammar", param="structured")


def check_grammar(text: str, kind: str, *, param: str, scope: str = "") -> str:
    """Check a Lark grammar, which a client wrote or which was made of something of this kind."""
    _check_available(param)
    check_text_size(len(text), param)
    if (found := _problem(text, scope)) is not None:
        message = f"the {kind} cannot be used: {found}"
        raise RequestError(message, code="invalid_grammar", param=param)
    return text


def _problem(text: str, scope: str) -> str | None:
    try:
        return CHECKS.problem(text, scope)
    except TimeoutError:
        return "it could not be compiled in time; make it simpler, or send it again"
    except UnicodeEncodeError:  # half of a surrogate pair
        return "it has characters that UTF-8 does not have"


def check_schema_text(text: str, *, param: str, scope: str = "") -> str:
    """Check a schema that comes as text."""
    _check_size(len(text), param)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        message = f"{param} must be a JSON schema as text, but {quoted(text)} is not JSON"
        raise _refused(message, param) from None
    return check_schema(schema, param=param, scope=scope)


def _check_available(param: str) -> None:
    if (reason := unavailable()) is not None:
        raise RequestError(reason, code="unsupported", param=param)


def _as_text(schema: Any, param: str) -> str:
    if not isinstance(schema, Mapping):
        raise _refused(f"a JSON schema must be an object, not {type(schema).__name__}", param)
    try:
        text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        message = "the JSON schema is nested too deeply or holds values that JSON does not have"
        raise _refused(message, param) from None
    _check_size(len(text), param)
    return text


def _check_size(size: int, param: str) -> None:
    if size > MAX_SCHEMA_BYTES:
        message = f"the JSON schema has {size} bytes and may have {MAX_SCHEMA_BYTES}; make it smaller"
        raise _refused(message, param)


def check_text_size(size: int, param: str) -> None:
    if size > MAX_SCHEMA_BYTES:
        message = f"{param} has {size} characters and may have {MAX_SCHEMA_BYTES}; make it smaller"
        raise RequestError(message, code="invalid_grammar", param=param)


def _refused(message: str, param: str = "response_format") -> RequestError:
    return RequestError(message, code="invalid_json_schema", param=param)


class SchemaChecks:
    """A pool of check processes with a cache of results per scope."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._cached: dict[str, OrderedDict[bytes, str | None]] = {}

    def problem(self, text: str, scope: str = "") -> str | None:
        """What is wrong with a schema, as the end of a sentence; None if it can be enforced."""
        digest = hashlib.sha256(text.encode()).digest()
        with self._lock:
            cached = self._cached.setdefault(scope, OrderedDict())
            if digest in cached:
                cached.move_to_end(digest)
                return cached[digest]
        found = self._ask(text)  # a TimeoutError is not cached: the machine may have been busy
        with self._lock:
            cached[digest] = found
            while len(cached) > _MAX_CACHED:
                cached.popitem(last=False)
        return found

    def lark_of_ebnf(self, text: str) -> tuple[str, str | None]:
        """A grammar in EBNF as Lark, or what is wrong with it. Not cached: it can be as long as the text."""
        try:
            reply = self._ask(EBNF_MARK + text)
        except TimeoutError:
            return "", "it could not be read in time; make it simpler, or send it again"
        except UnicodeEncodeError:
            return "", "it has characters that UTF-8 does not have"
        if reply is not None and reply.startswith(EBNF_MARK):
            return reply.removeprefix(EBNF_MARK), None
        return "", reply

    def _ask(self, text: str) -> str | None:
        """Uses one process per concurrent caller; callers limit their own number."""
        process = self._take_idle() or _Process()
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

    def _take_idle(self) -> _Process | None:
        with self._lock:
            self._idle = [process for process in self._idle if process.is_ours]
            return self._idle.pop() if self._idle else None

    def close(self) -> None:
        with self._lock:
            idle = self._idle
            self._idle = []
        for process in idle:
            process.end()


class _Process:
    """A check process and its socket. It ends when the socket closes, so it never outlives its parent."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._parent = os.getpid()
        command = [sys.executable, "-m", "saccade.structured.schema_validation_worker"]
        with theirs:
            end = theirs.fileno()
            self._process = subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.DEVNULL)
        self._replies = self._socket.makefile("rb")

    @property
    def is_ours(self) -> bool:
        """False after a fork, in the child."""
        return self._parent == os.getpid()

    def ask(self, text: str) -> str | None:
        """The reply, which may be empty; None if the process died of the text. TimeoutError if it hangs."""
        self._socket.settimeout(_SECONDS)
        try:
            self._socket.sendall(framed(text))
            return read_frame(self._replies)
        except ConnectionError:
            return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._replies.close()
        self._socket.close()


def read_frame(stream: BufferedIOBase) -> str | None:
    """Four bytes of length, then text. None at the end of the stream."""
    size = stream.read(4)
    if len(size) < 4:
        return None
    data = stream.read(int.from_bytes(size))
    return data.decode() if len(data) == int.from_bytes(size) else None


def framed(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4) + data


CHECKS = SchemaChecks()
