"""The grammars of all open requests: a schema is compiled once, copied for each answer, and forgotten when unused.

What takes long happens in threads beside the steps. Whoever waits for one sits steps out; nobody else does.

    request comes ─► compile its schema (once) ─► copy, first mask ─► step ─► next mask ─► step ─► ...
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from saccade.checkpoint.tokenizer_json import read_tokenizer
from saccade.errors import RequestError
from saccade.fair_pool import FairPool
from saccade.structured.matcher import Grammar, Template, too_complex
from saccade.structured.schema import compiled, is_available, unavailable
from saccade.structured.time_budget import Budget
from saccade.types import Request

if is_available():
    from llguidance import LLTokenizer

_MAX_THREADS = 4
_MAX_TEMPLATES = 64
_TEMPLATE_BYTES = 128 << 20  # of compiled schemas that are kept for the next request
_BYTES_PER_LETTER = 200  # of a schema: what it takes once it is compiled, at the most that was measured
_IDLE_SECONDS = 0.05  # between two looks when everybody waits for a grammar

logger = logging.getLogger("saccade.engine")


class _Key(NamedTuple):
    """What makes two requests have one template."""

    salt: bytes  # of their tenant: nobody can tell by the time what schemas others use
    schema: str
    answers: int  # that share a request's limits


class Grammars:
    """Makes grammars for one tokenizer, which is read when the first one is wanted: that takes a second or three.

    Meanwhile nothing else runs in the process, not even a thread, so a server asks for one before it is ready.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._open: dict[str, Grammar] = {}
        self._budgets: weakref.WeakValueDictionary[str, Budget] = weakref.WeakValueDictionary()
        self._templates: OrderedDict[_Key, Future[Template]] = OrderedDict()
        self._compiling = FairPool(1, "saccade-compile")
        self._masking = FairPool(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)), "saccade-mask")
        self._pending: dict[str, float] = {}  # requests that wait for a thread, and since when
        self._changed = threading.Condition()

    @property
    def problem(self) -> str | None:
        """Why there are none, for the start-up log."""
        return unavailable()

    @property
    def has_open(self) -> bool:
        return bool(self._open)

    def of(self, request: Request) -> Grammar | None:
        """The grammar of an open request, which begins to be made if it is new; None if its answer is free."""
        schema = request.params.structured
        if schema is None:
            return None
        grammar = self._open.get(request.request_id)
        return grammar or self._begun(request, schema)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        grammar = self._open.pop(request_id, None)
        with self._changed:
            self._pending.pop(request_id, None)
        if grammar:  # thousands of small pieces may have to be freed, which is not to be done in a step either
            self._masking.submit(request_id, grammar.release)

    def not_ready(self, num_open: int, patience: float) -> frozenset[str]:
        """Requests that wait for a grammar, once those that came lately had `patience` seconds to be done.

        `num_open`: requests that there are. When all of them wait, so does the caller, until one can go on.
        """
        if not self._pending:
            return frozenset()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending, self._rest_of(patience))
            waiting = len(self._pending)
            if waiting and waiting >= num_open:
                self._changed.wait_for(lambda: len(self._pending) < waiting, _IDLE_SECONDS)
            return frozenset(self._pending)

    def close(self) -> None:
        self._compiling.close()
        self._masking.close()

    def _rest_of(self, patience: float) -> float:
        return max(0.0, max(self._pending.values(), default=0.0) + patience - time.monotonic())

    def _begun(self, request: Request, schema: str) -> Grammar:
        request_id, owner = request.request_id, request.family
        budget = self._budgets.setdefault(owner, Budget())
        grammar = Grammar(request.eos_token_ids, budget, partial(self._hand_over, request_id, owner))
        self._open[request_id] = grammar
        self._wait_for(request_id)
        template = self._template(_Key(request.prompt.salt, schema, request.params.n), owner)
        template.add_done_callback(partial(self._compiled, request_id, owner, weakref.ref(grammar)))
        return grammar

    def _compiled(self, request_id: str, owner: str, waiting: weakref.ref[Grammar], template: Future[Template]) -> None:
        """The template stays, and with it whoever was called back: that must not keep the grammars of all requests."""
        if (grammar := waiting()) is not None:
            self._submit(request_id, owner, grammar, lambda: grammar.begin(template.result()))

    def _hand_over(self, request_id: str, owner: str, grammar: Grammar) -> None:
        self._wait_for(request_id)
        self._submit(request_id, owner, grammar, grammar.make_mask)

    def _wait_for(self, request_id: str) -> None:
        with self._changed:
            self._pending[request_id] = time.monotonic()

    def _submit(self, request_id: str, owner: str, grammar: Grammar, work: Callable[[], None]) -> None:
        def do() -> None:
            try:
                work()
            except RequestError as error:
                grammar.fail(error)
            except Exception:
                logger.exception("a grammar failed; its request ends")
                grammar.fail(too_complex())
            with self._changed:
                if self._open.get(request_id) is grammar:
                    self._pending.pop(request_id, None)
                self._changed.notify_all()

        self._masking.submit(owner, do)

    def _template(self, key: _Key, owner: str) -> Future[Template]:
        """Compiled, or being compiled. Those that were not used lately are forgotten when there are too many."""
        if key not in self._templates:
            self._templates[key] = self._compiling.submit(owner, partial(self._compile, key.schema, key.answers))
        self._templates.move_to_end(key)
        while len(self._templates) > 1 and not self._fit():
            self._templates.popitem(last=False)
        return self._templates[key]

    def _fit(self) -> bool:
        letters = sum(len(key.schema) for key in self._templates)
        return len(self._templates) <= _MAX_TEMPLATES and letters * _BYTES_PER_LETTER <= _TEMPLATE_BYTES

    def _compile(self, schema: str, answers: int) -> Template:
        if (reason := unavailable()) is not None:
            raise RequestError(reason, code="unsupported", param="response_format")
        tokenizer = self._tokenizer
        try:
            matcher = compiled(tokenizer, schema, answers)
        except ValueError:  # no JSON
            raise too_complex() from None
        if matcher.is_error():
            raise too_complex()
        return Template(matcher, tokenizer)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        text = read_tokenizer(self._folder)
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size)
        except ValueError:
            message = "answers cannot be held to a JSON schema here: llguidance cannot read this model's tokenizer"
            raise RequestError(message, code="unsupported", param="response_format") from None
