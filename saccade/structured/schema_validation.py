"""Structured output on the server's side: JSON schemas and Lark grammars that the engine can enforce.

They are checked in processes (`schema_validation_worker`) that can be ended, since a client can
make one arbitrarily costly. Results are cached per `scope` (tenant): no tenant can tell what others sent.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from saccade.errors import EngineUnavailable, RequestError, quoted
from saccade.helpers.process import HelperPool, HelperProcess, Outcome
from saccade.structured.schema import is_schema, unavailable

MAX_SCHEMA_BYTES = 256 << 10
ANY_OBJECT = '{"type":"object"}'
CPU_SECONDS = 2.0  # for one schema; the engine needs about as long to compile it again
_PROCESSES = 4  # the server asks from fewer threads
_RETRY_SECONDS = 1.0  # when a process cannot be started
_MAX_CACHED = 256  # results of one scope: a hash and a sentence each
EBNF_MARK = "\0ebnf\0"  # before a text that a process converts, and before the converted one
_NO_UTF8 = "it has characters that UTF-8 does not have"
TOO_COMPLEX = "it is too complex to be compiled; make it simpler"


def check_schema(schema: Any, *, param: str = "response_format", scope: str = "") -> str:
    """The schema as text. RequestError if the engine cannot enforce it."""
    _check_available(param)
    text = _as_text(schema, param)
    if text != ANY_OBJECT and (problem := _problem(text, scope)) is not None:
        raise _refused(f"the JSON schema cannot be used: {problem}", param)
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
    if (problem := _problem(text, scope)) is not None:
        message = f"the {kind} cannot be used: {problem}"
        raise RequestError(message, code="invalid_grammar", param=param)
    return text


def _problem(text: str, scope: str) -> str | None:
    try:
        return CHECKS.problem(text, scope)
    except UnicodeEncodeError:  # half of a surrogate pair
        return _NO_UTF8


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
        worker = "saccade.structured.schema_validation_worker"
        self._processes = HelperPool([HelperProcess(worker) for _ in range(_PROCESSES)])
        self._cached: dict[str, OrderedDict[bytes, str | None]] = {}

    def problem(self, text: str, scope: str = "") -> str | None:
        """What is wrong with a schema, as the end of a sentence; None if it can be enforced."""
        digest = hashlib.sha256(text.encode()).digest()
        with self._lock:
            cached = self._cached.setdefault(scope, OrderedDict())
            if digest in cached:
                cached.move_to_end(digest)
                return cached[digest]
        problem = self._ask(text)
        with self._lock:
            cached[digest] = problem
            while len(cached) > _MAX_CACHED:
                cached.popitem(last=False)
        return problem

    def lark_of_ebnf(self, text: str) -> tuple[str, str | None]:
        """A grammar in EBNF as Lark, or what is wrong with it. Not cached: it can be as long as the text."""
        try:
            reply = self._ask(EBNF_MARK + text)
        except UnicodeEncodeError:
            return "", _NO_UTF8
        if reply is not None and reply.startswith(EBNF_MARK):
            return reply.removeprefix(EBNF_MARK), None
        return "", reply

    def _ask(self, text: str) -> str | None:
        body = text.encode()
        reply = self._processes.use(lambda process: process.ask([body], CPU_SECONDS))
        if reply.outcome in (Outcome.UNAVAILABLE, Outcome.CANCELLED):  # which says nothing about the text
            message = (
                "the process that checks schemas cannot be started, stands still or was killed; try again"
            )
            raise EngineUnavailable(message, _RETRY_SECONDS)
        if reply.outcome is not Outcome.DONE:
            return TOO_COMPLEX
        return reply.body.decode() or None

    def close(self) -> None:
        """End the processes. Another check starts one again."""
        for process in self._processes.helpers:
            process.cancel()


CHECKS = SchemaChecks()
