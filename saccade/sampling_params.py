"""Sampling parameters: what a client may ask of the sampler, checked on construction."""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from saccade.errors import RequestError, is_int_within, is_list_of, is_number_within, is_text, quoted

logger = logging.getLogger("saccade.options.engine")

MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024  # of one: it is kept while the request runs, and every token looks for its beginning
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKENS = 1 << 18
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
_MIN_TEMPERATURE = 1e-5  # below this sampling is greedy, and dividing by it would overflow


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What an output must follow: one of these, named as in vLLM."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None  # one of these strings
    grammar: str | None = None  # in Lark or EBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # free text with parts that follow schemas
    backend: str | None = None  # accepted for vLLM's sake, as is the next
    disable_fallback: bool = False


GuidedDecodingParams = StructuredOutputsParams
"""Its older name in vLLM, where `SamplingParams` takes it as `guided_decoding`."""


class Pooling(NamedTuple):
    """What a request gets of its last prompt token in place of an output: the end of prefill is its end."""

    token_ids: tuple[int, ...] = ()  # the logits of these tokens; of none: the hidden state after the norm
    every_token: bool = False  # instead one vector for each prompt token (late interaction)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    `temperature=0` is greedy. A `seed` makes the text repeatable whatever it is batched with, but for near
    ties: GEMMs of other sizes round the last bits differently.
    """

    n: int = 1  # completions of one prompt that are returned
    temperature: float = 1.0
    top_p: float = 1.0  # keep the smallest set of tokens whose probabilities reach this sum
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the most likely one
    presence_penalty: float = 0.0  # subtracted once from tokens already generated
    frequency_penalty: float = 0.0  # subtracted for each time a token was generated
    repetition_penalty: float = 1.0  # divides (or multiplies) logits of tokens in the prompt or the output
    seed: int | None = None
    stop: str | Sequence[str] | None = None  # strings that end the output; not included in it
    stop_token_ids: Sequence[int] = field(default_factory=tuple)  # None means none
    max_tokens: int | None = 16  # None: as many as the context holds
    min_tokens: int = 0  # no end token before this many
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside the chosen token
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    structured: str | None = None  # a JSON schema or a Lark grammar as text, which the output follows
    skip_special_tokens: bool = True  # leave control tokens out of the text
    include_stop_str_in_output: bool = False  # keep the stop string that ended the output
    structured_outputs: Any = None  # StructuredOutputsParams or its fields as a dict; becomes `structured`
    allowed_token_ids: Sequence[int] | None = None  # only these are sampled; an end token too only if named
    bad_words: Sequence[str] | None = None  # the output has none of them, at its start or after a space
    bad_words_token_ids: Sequence[Sequence[int]] | None = None  # the same as tokens; set by the processor
    truncate_prompt_tokens: int | None = None  # only the last so many tokens of a prompt; -1: what fits
    thinking_token_budget: int | None = None  # tokens of thinking before it is closed; None: no limit
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens; it is then computed anew
    best_of: int | None = None  # so many are sampled, and the n with the highest mean logprob returned
    pooling: Pooling | None = None  # set by `embed` and `score`: nothing is sampled

    def __post_init__(self) -> None:
        ids = _as_ints(self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", () if ids is None else ids)
        object.__setattr__(self, "allowed_token_ids", _as_ints(self.allowed_token_ids))
        self._check_types()
        self._check_ranges()
        self._check_sizes()

    def clone(self) -> SamplingParams:
        return replace(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_outputs(self) -> int:
        """Completions that are sampled."""
        return self.best_of or self.n

    @property
    def num_prompt_logprobs(self) -> int:
        """Alternatives to each token of the prompt; 0 too where no log probabilities are asked for."""
        return self.prompt_logprobs or 0

    @property
    def picks_best(self) -> bool:
        return self.num_outputs > self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _MIN_TEMPERATURE

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def samples_on_device(self) -> bool:
        """Sampling needs only the logits and the position, not the tokens before.

        Then the device samples by itself and starts the next step before the host has seen the token.
        """
        changes = (self.has_penalty, self.logit_bias, self.min_tokens, self.structured)
        words = (self.bad_words, self.bad_words_token_ids)
        limits = (self.allowed_token_ids, self.thinking_token_budget)
        reports = (self.logprobs, self.prompt_logprobs, self.pooling)
        return not any((*changes, *words)) and all(value is None for value in (*limits, *reports))

    @property
    def needs_prompt_rows(self) -> bool:
        """Something is made from the hidden state of every prompt token, which no cache keeps.

        Then the whole prompt is computed: no cached prefix is taken.
        """
        if self.prompt_logprobs is not None:
            return True
        return self.pooling is not None and self.pooling.every_token

    def _check_types(self) -> None:
        for name in _INTS:
            _require(is_int_within(getattr(self, name)), name, getattr(self, name), "a whole number")
        for name, value in self._set_among(_OPTIONAL_INTS):
            _require(is_int_within(value), name, value, "a whole number or nothing")
        for name in _BOOLS:
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        for name in FLOATS:
            _require(
                is_number_within(getattr(self, name), *_FINITE), name, getattr(self, name), "a finite number"
            )
        for name, value in self._set_among(_OPTIONAL_TYPES):
            types, words = _OPTIONAL_TYPES[name]
            _require(isinstance(value, types), name, value, words)
        for stop in self.stop_strings:
            _require(is_text(stop), "stop", stop, "a string that is not empty")
        outputs = self.structured_outputs
        is_one = None in (outputs, self.structured)
        _require(is_one, "structured_outputs", outputs, "left out where structured is given")
        self._check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", self.allowed_token_ids)
        bad = self.bad_words or ()
        _require(is_list_of(bad, str), "bad_words", bad, "a list of strings")
        _require(all(word.strip() for word in bad), "bad_words", bad, "words, not white space")

    def _set_among(self, names: Iterable[str]) -> list[tuple[str, Any]]:
        """Those of these fields that are not None."""
        return [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]

    def _check_ids(self, name: str, ids: Any) -> None:
        _require(isinstance(ids, Sequence) and not isinstance(ids, str), name, ids, "a list of token ids")
        for token in ids:
            is_id = is_int_within(token, 0, MAX_TOKEN_ID)
            _require(is_id, name, token, "a list of whole numbers that are token ids")

    def _check_ranges(self) -> None:
        for name, value in self._set_among(_RANGES):
            low, high, words = _RANGES[name]
            _require(low <= value <= high, name, value, words)
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require(fits, "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        best_of = self.best_of
        in_range = best_of is None or self.n <= best_of <= MAX_N
        _require(in_range, "best_of", best_of, f"from n={self.n} to {MAX_N}")
        _require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, _TRUNCATION)

    def _check_sizes(self) -> None:
        self._check_list("stop", self.stop_strings, MAX_STOP_STRINGS, "strings", MAX_STOP_CHARS)
        count = len(self.stop_token_ids)
        _require(
            count <= MAX_STOP_STRINGS, "stop_token_ids", f"{count} ids", f"at most {MAX_STOP_STRINGS} ids"
        )
        if self.allowed_token_ids is not None:
            count = len(self.allowed_token_ids)
            words = f"1 to {MAX_ALLOWED_TOKENS} token ids"
            _require(1 <= count <= MAX_ALLOWED_TOKENS, "allowed_token_ids", f"{count} ids", words)
        self._check_list("bad_words", self.bad_words or (), MAX_BAD_WORDS, "words", MAX_BAD_WORD_CHARS)
        bias = self.logit_bias or {}
        words = f"at most {MAX_LOGIT_BIAS} tokens"
        _require(len(bias) <= MAX_LOGIT_BIAS, "logit_bias", f"{len(bias)} tokens", words)
        for token, value in bias.items():
            _require(is_int_within(token, 0), "logit_bias", token, "a map from token ids")
            _require(is_number_within(value, -100, 100), "logit_bias", value, "from -100 to 100")

    def _check_list(self, name: str, texts: Sequence[str], max_count: int, kind: str, max_chars: int) -> None:
        count = len(texts)
        _require(count <= max_count, name, f"{count} {kind}", f"at most {max_count} {kind}")
        length = max(map(len, texts), default=0)
        _require(length <= max_chars, name, f"one of {length}", f"{kind} of at most {max_chars} characters")


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What `LLM.beam_search` takes."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0  # beams are compared by their log probability over length to this power

    def __post_init__(self) -> None:
        maximum = MAX_LOGPROBS // 2  # each beam is asked for twice as many next tokens
        is_width = is_int_within(self.beam_width, 1, maximum)
        _require(is_width, "beam_width", self.beam_width, f"from 1 to {maximum}")
        _require(is_int_within(self.max_tokens, 1), "max_tokens", self.max_tokens, "1 or more")
        _require(
            is_number_within(self.length_penalty, *_FINITE),
            "length_penalty",
            self.length_penalty,
            "a finite number",
        )


REFUSED: Mapping[str, str] = {
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "flat_logprobs": "read logprobs, one dict for each token",
    "extra_args": "they are for plugins, and there are none",
    "skip_reading_prefix_cache": "give the prompt a cache_salt, or LLM enable_prefix_caching=False",
    "repetition_detection": "use repetition_penalty, frequency_penalty or stop",
}
"""vLLM's parameters that are refused, and what to use instead."""

INERT: Mapping[str, str] = {
    "detokenize": "text is made when it is read",
    "spaces_between_special_tokens": "the tokenizer's own rules hold",
    "output_kind": "generate returns whole outputs, and engine.step what there is so far",
    "skip_clone": "parameters are never changed",
}
"""vLLM's parameters that are accepted and change nothing, and why."""


def _without_foreign(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without vLLM's parameters that ask for nothing here. RequestError for those that do."""
    for name in values.keys() & REFUSED.keys():
        value = values.pop(name)
        if value:
            message = f"{name}={quoted(value)} is not supported: {REFUSED[name]}"
            raise RequestError(message, code="unsupported", param=name)
    for name in values.keys() & INERT.keys():
        values.pop(name)
        logger.info("SamplingParams %s changes nothing here: %s", name, INERT[name])
    if (structure := values.pop("guided_decoding", None)) is not None:
        values["structured_outputs"] = structure
    return values


def _naming_unknown(init: Callable[..., None]) -> Callable[..., None]:
    names = [item.name for item in fields(SamplingParams)]

    def checked_init(self: SamplingParams, *args: object, **values: Any) -> None:
        for name in _without_foreign(values):
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"do you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
                raise TypeError(f"SamplingParams has no {name!r}: {hint}")
        init(self, *args, **values)

    return checked_init


SamplingParams.__init__ = _naming_unknown(SamplingParams.__init__)  # type: ignore[method-assign]

_INTS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTS = (
    *("seed", "max_tokens", "logprobs", "truncate_prompt_tokens", "thinking_token_budget"),
    *("prompt_logprobs", "best_of"),
)
_BOOLS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_FINITE = (-sys.float_info.max, sys.float_info.max)
_TRUNCATION = "1 or more, or -1 for what fits"
_RANGES: Mapping[str, tuple[float, float, str]] = {  # the lowest, the highest, and both in words
    "n": (1, MAX_N, f"from 1 to {MAX_N}"),
    "temperature": (0, math.inf, "0 or more"),
    "top_p": (math.ulp(0), 1, "above 0 and at most 1"),
    "top_k": (-1, math.inf, "-1 or more"),
    "min_p": (0, 1, "from 0 to 1"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
    "repetition_penalty": (0.01, 100, "from 0.01 to 100 (1 changes nothing)"),
    "max_tokens": (1, math.inf, "1 or more"),
    "min_tokens": (0, math.inf, "0 or more"),
    "seed": (-MAX_SEED, MAX_SEED, "a 64-bit number"),
    "logprobs": (0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    "thinking_token_budget": (0, math.inf, "0 or more"),
    "truncate_prompt_tokens": (-1, math.inf, _TRUNCATION),
}
_OPTIONAL_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "stop": ((str, list, tuple), "a string or a list of strings"),
    "structured": (str, "a string"),
    "structured_outputs": (
        (StructuredOutputsParams, Mapping),
        "StructuredOutputsParams or a dict of its fields",
    ),
    "pooling": (Pooling, "left out; use embed or score"),
    "logit_bias": (Mapping, "a map from token ids to numbers"),
}
OF_CHECKPOINT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What generation_config.json sets under the same name."""


def _as_ints(ids: Any) -> Any:
    """Token ids of another library, such as NumPy, as a list of ints. What has none stays as it is."""
    if not isinstance(ids, Iterable) or isinstance(ids, (str, Mapping)) or all(map(is_int_within, ids)):
        return ids
    try:
        return [token if isinstance(token, bool) else operator.index(token) for token in ids]
    except TypeError:
        return ids


def _require(condition: bool, name: str, value: object, words: str) -> None:
    if not condition:
        raise RequestError(f"{name} must be {words}, but {quoted(value)} was given", param=name)
