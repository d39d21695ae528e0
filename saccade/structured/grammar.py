"""Structured output in the engine (vLLM: StructuredOutputManager): grammars and masks.

A schema is compiled once and copied for each output. Compiling and masking run in threads beside the steps; a
request that waits for them skips steps, others do not. Each request has a budget of CPU time.

    new request ─► compile its schema (once) ─► copy, first mask ─► step ─► next mask ─► step ─► ...
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.checkpoint.tokenizer_json import read_tokenizer
from saccade.errors import RequestError
from saccade.structured.schema import compiled, is_available, is_schema, unavailable
from saccade.structured.thinking import ThinkingGate
from saccade.types.request import Request, Thinking
from saccade.util.fair_pool import FairPool

if is_available():
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.numpy import fill_next_token_bitmask

_MAX_THREADS = 4
_MAX_TEMPLATES = 64
_TEMPLATE_BYTES = 128 << 20  # of cached compiled schemas
_BYTES_PER_LETTER = 200  # of a schema, once compiled: the measured maximum
_IDLE_SECONDS = 0.05  # between two polls when every request waits for a grammar

logger = logging.getLogger("saccade.engine")

Bits = npt.NDArray[np.int32]
"""One bit per token of the vocabulary, 32 to a word, lowest first."""


class _Key(NamedTuple):
    """Requests with equal keys share a template."""

    salt: bytes  # of the tenant, so that timing does not tell which schemas others use
    schema: str
    answers: int  # outputs of a request, which share its limits


class Grammars:
    """Makes grammars for one tokenizer, which is built with the first: one to three seconds with the GIL.

    A server therefore requests a grammar before it is ready.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._open: dict[str, Grammar] = {}
        self._budgets: weakref.WeakValueDictionary[str, Budget] = weakref.WeakValueDictionary()
        self._templates: OrderedDict[_Key, Future[Template]] = OrderedDict()
        self._compiling = FairPool(1, "saccade-compile")
        self._masking = FairPool(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)), "saccade-mask")
        self._pending: dict[str, float] = {}  # waiting requests -> since when
        self._changed = threading.Condition()

    @property
    def problem(self) -> str | None:
        """Why structured output is unavailable, for the start-up log."""
        return unavailable()

    @property
    def has_open(self) -> bool:
        return bool(self._open)

    def of(self, request: Request) -> Grammar | None:
        """The grammar of a request, started if it is new; None if the request has no schema."""
        schema = request.params.structured
        if schema is None:
            return None
        if request.request_id in self._open:
            return self._open[request.request_id]
        return self._begun(request, schema)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        grammar = self._open.pop(request_id, None)
        with self._changed:
            self._pending.pop(request_id, None)
        if grammar:  # freeing thousands of small objects is too slow for a step
            self._masking.submit(request_id, grammar.release)

    def not_ready(self, num_open: int, patience: float) -> frozenset[str]:
        """Requests that wait for a mask, after giving recent ones up to `patience` seconds.

        `num_open` is the number of all requests. If all of them wait, the call blocks until one is ready.
        """
        if not self._pending:
            return frozenset()
        with self._changed:
            seconds = max(self._pending.values(), default=0.0) + patience - time.monotonic()
            self._changed.wait_for(lambda: not self._pending, max(0.0, seconds))
            num_waiting = len(self._pending)
            if num_waiting >= max(num_open, 1):
                self._changed.wait_for(lambda: len(self._pending) < num_waiting, _IDLE_SECONDS)
            return frozenset(self._pending)

    def close(self) -> None:
        self._compiling.close()
        self._masking.close()

    def _begun(self, request: Request, schema: str) -> Grammar:
        request_id = request.request_id
        owner = request.family
        budget = self._budgets.setdefault(owner, Budget())
        hand_over = partial(self._hand_over, request_id, owner)
        grammar = Grammar(request.eos_token_ids, budget, hand_over, request.thinking, _code(schema))
        self._open[request_id] = grammar
        self._wait_for(request_id)
        template = self._template(_Key(request.prompt.salt, schema, request.params.num_outputs), owner)
        weak_grammar = weakref.ref(grammar)  # since a cached template keeps its callbacks alive

        def begin(template: Future[Template]) -> None:
            if (grammar := weak_grammar()) is not None:
                self._submit(request_id, owner, grammar, lambda: grammar.begin(template.result()))

        template.add_done_callback(begin)
        return grammar

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
                grammar.refuse(_TOO_COMPLEX)
            with self._changed:
                if self._open.get(request_id) is grammar:
                    self._pending.pop(request_id, None)
                self._changed.notify_all()

        self._masking.submit(owner, do)

    def _template(self, key: _Key, owner: str) -> Future[Template]:
        """A compiled schema, or one being compiled, from an LRU cache."""
        if key not in self._templates:
            work = partial(self._compile, key.schema, key.answers)
            self._templates[key] = self._compiling.submit(owner, work)
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
            is_error = matcher.is_error()
        except ValueError:  # no JSON
            is_error = True
        if is_error:
            raise _refusal(_TOO_COMPLEX, _code(schema))
        return Template(matcher, tokenizer)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        text = read_tokenizer(self._folder)
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size)
        except ValueError:
            reason = "llguidance cannot read this model's tokenizer"
            message = f"answers cannot be held to a structure here: {reason}"
            raise RequestError(message, code="unsupported", param="response_format") from None


class Template(NamedTuple):
    """A compiled schema, which outputs copy."""

    matcher: LLMatcher
    tokenizer: LLTokenizer


class Grammar:
    """The matcher of one output: `allowed`, then `advance` with the sampled token, and so on.

    `advance` is fast and runs in the step. `begin` and `make_mask` may be slow and run in other threads.
    """

    def __init__(
        self,
        end_ids: frozenset[int],
        budget: Budget,
        hand_over: Callable[[Grammar], None],
        thinking: Thinking | None = None,
        code: str = "invalid_json_schema",
    ) -> None:
        """`code` is that of errors."""
        self._ends = end_ids
        self._code = code
        self._thinking = thinking
        self._gate: ThinkingGate | None = None  # where the output may think first
        self._budget = budget
        self._hand_over = hand_over  # has `make_mask` called in a thread
        self._matcher: LLMatcher | None = None
        self._bits: Bits | None = None
        self._is_made = threading.Event()
        self.is_complete = False  # the output must end
        self.error: RequestError | None = None

    def allowed(self) -> Bits | None:  # [words]
        """The tokens allowed next, including EOS where the output may end.

        None after an error, and while the output thinks: then all are allowed.
        """
        self._is_made.wait()
        if self._gate is None or self._bits is None:
            return self._bits
        if self._gate.is_open:
            return None
        if (opener := self._gate.opener) is None:
            return self._bits
        bits = self._bits.copy()
        _set(bits, np.array([opener], np.int64))
        return bits

    def must_end(self, bits: Bits) -> bool:
        """Whether only EOS tokens are allowed."""
        bits_left = bits.copy()
        _clear(bits_left, self._end_ids)
        return not bits_left.any()

    def advance(self, token: int) -> None:
        if token in self._ends:
            self.is_complete = True
            return
        if self._matcher is None or self.error:
            return
        tokens = self._gate.take(token) if self._gate else [token]
        if not tokens:
            return
        with self._budget.step.spending():
            self._matcher.consume_tokens(tokens)
        self._budget.step.earn()
        self._budget.masks.earn()
        if self._matcher.is_error():
            self.refuse(_TOO_COMPLEX)
        elif self._budget.step.is_spent:
            self.refuse(_TOO_COSTLY)
        elif self._matcher.is_stopped():
            self.is_complete = True
        else:
            self._is_made.clear()
            self._hand_over(self)

    def begin(self, template: Template) -> None:
        vocabulary = template.tokenizer.vocab_size
        self._words = -(-vocabulary // 32)
        self._library_ends = np.array(template.tokenizer.eos_tokens, np.int64)
        self._end_ids = np.array(sorted(end for end in self._ends if end < vocabulary), np.int64)
        with self._budget.masks.spending():
            self._matcher = template.matcher.deep_copy()
        if self._thinking is not None:
            self._gate = ThinkingGate(self._thinking, template.tokenizer)
        self.make_mask()

    def make_mask(self) -> None:
        matcher = self._matcher
        if matcher is None:  # the request has ended
            return
        if self._budget.masks.is_spent:
            self.refuse(_TOO_COSTLY)
            return
        with self._budget.masks.spending():
            bits = self._mask(matcher)
        if bits is None:
            self.refuse(_TOO_COMPLEX)
        else:
            self._bits = bits
            self._is_made.set()

    def release(self) -> None:
        """The request has ended: free the matcher."""
        self._matcher = None

    def refuse(self, message: str) -> None:
        self.fail(_refusal(message, self._code))

    def fail(self, error: RequestError) -> None:
        if self.error is None:
            self.error = error
        self._bits = None
        self._is_made.set()

    def _mask(self, matcher: LLMatcher) -> Bits | None:
        bits = np.zeros(self._words, np.int32)
        fill_next_token_bitmask(matcher, bits[None])
        if matcher.is_error():
            return None
        # The library has one EOS token; the request has its own set, which may be empty.
        _clear(bits, self._library_ends)
        if matcher.is_accepting():
            _set(bits, self._end_ids)
        return bits


_TOO_COMPLEX = "the answer cannot be held to this schema or grammar, which is too complex; make it simpler"
_COSTLY = "a schema or grammar that takes more than its share of time"
_TOO_COSTLY = f"the answers were held to {_COSTLY}; make it simpler"


def _code(structured: str) -> str:
    """The code of its errors, the same as where the server checks it."""
    return "invalid_json_schema" if is_schema(structured) else "invalid_grammar"


def _refusal(message: str, code: str) -> RequestError:
    return RequestError(message, code=code, param="response_format")


def _set(bits: Bits, tokens: npt.NDArray[np.int64]) -> None:
    words = bits.view(np.uint32)
    np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))


def _clear(bits: Bits, tokens: npt.NDArray[np.int64]) -> None:
    words = bits.view(np.uint32)
    np.bitwise_and.at(words, tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))


class Allowance:
    """A token bucket of CPU seconds: `at_once` to start with and at most, plus `per_token` for each token."""

    def __init__(self, at_once: float, per_token: float) -> None:
        self._maximum = self._left = at_once
        self._per_token = per_token
        self._lock = threading.Lock()

    @property
    def is_spent(self) -> bool:
        return self._left < 0

    def earn(self) -> None:
        """A token was sampled."""
        with self._lock:
            self._left = min(self._left + self._per_token, self._maximum)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Charge this thread's CPU time. CPU time, so that a busy machine costs a request nothing."""
        start = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self._left -= time.thread_time() - start


class Budget:
    """CPU time that all outputs of one request share."""

    def __init__(self) -> None:
        # With a vocabulary of 150,000 typical grammars take 0.05 ms to accept a token and up to 3 ms a mask.
        self.step = Allowance(at_once=0.25, per_token=0.0005)  # inside of steps, which block every request
        self.masks = Allowance(at_once=2.0, per_token=0.010)  # in threads
