"""How a JSON schema becomes a grammar. Both sides need it: the server checks with it what the engine will compile.

Knows no tokenizer, no request and no torch. The compiler, llguidance, has no wheel for some machines: it is imported
where it is used, so that everything but structured output works without it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MIN_VERSION = "1.8"  # of llguidance: older ones lack end tokens, or repeat white space without end

# A model that is unsure likes to write white space for ever. This much is enough for any indented or compact style.
_WHITESPACE = r"[ ]{1,2}|\n[ ]{0,32}"
_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,  # an approximated oneOf would let answers through that the schema refuses
    "lenient": False,  # the same for keywords that are not understood
}
# The library would write out and tokenize all the text that must follow, for each token, under none of its limits:
# with ^a{120000}$ that took 50 ms a token. Without it the model itself writes that text, a token at a time.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'

# Honest schemas with a vocabulary of 150,000 tokens took at most 16,000 of fuel, 5,400 items a token, rows of 1,600
# items and a grammar of 21,000 (128 tools of 30 arguments).
_LEXER_FUEL = 1_000_000  # when a grammar is compiled, about half a second
_STEP_FUEL = 50_000  # for each token, about 25 ms
_STEP_ITEMS = 8_000  # also what taking a token costs, while others wait: 20 ms at the most
_ROW_ITEMS = 2_000
_GRAMMAR_SIZE = 50_000
# Up to 1 kB each. Each answer has its own, so the answers of one request share what a request may have.
_REQUEST_STATES = 256_000
_MAX_STATES = 32_000


def is_available() -> bool:
    return unavailable() is None


def unavailable() -> str | None:
    """Why answers cannot be held to a JSON schema here, as a sentence; None if they can."""
    try:
        library = import_module("llguidance")
    except ImportError:
        return "answers cannot be held to a JSON schema here: llguidance is not installed on this machine"
    if _works(library):
        return None
    return (
        "answers cannot be held to a JSON schema here: the llguidance on this machine does not work with Saccade; "
        f"install llguidance {MIN_VERSION} or newer"
    )


@lru_cache(maxsize=4)
def _works(library: ModuleType) -> bool:
    """Some versions can be imported and lack what is needed. A trial on bytes tells, in a few milliseconds."""
    try:
        tokenizer = library.LLTokenizer("byte")
        matcher = compiled(tokenizer, '{"type":"array","items":{"const":7},"minItems":1}', answers=1).deep_copy()
        is_bounded = matcher.deep_copy().try_consume_tokens([*b"[   7]"]) == 3  # in its white space
        return is_bounded and bool(tokenizer.eos_tokens) and matcher.try_consume_tokens([*b"[  7]"]) == 5
    except Exception:  # whatever another version does: it is of no use
        return False


def compiled(tokenizer: LLTokenizer, schema: str, answers: int) -> LLMatcher:
    """A matcher of one JSON value that follows `schema`, for a request of so many answers; ValueError if that is no
    JSON object. A schema that is too complex makes a matcher with an error."""
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, grammar_of(schema), log_level=0, limits=limits(answers))


def grammar_of(schema: str) -> str:
    """The grammar of one JSON value that follows `schema`, as the engine compiles it."""
    return f"{_NO_FORCING}start: %json {json.dumps(json.loads(rules_of(schema))['grammars'][0]['json_schema'])}"


def rules_of(schema: str) -> str:
    """The same alone, of which the library complains more clearly; ValueError if the schema is no JSON object.

    Options in the schema itself (`x-guidance`) are overruled: they come from a client.
    """
    from llguidance import LLMatcher

    try:
        given: dict[str, Any] = json.loads(schema)
        return LLMatcher.grammar_from_json_schema(given, overrides=_OPTIONS)  # type: ignore[arg-type]
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def limits(answers: int = 1) -> LLParserLimits:
    """What one of a request's answers may take. Past a limit a matcher stops with an error; it never runs on."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_ROW_ITEMS,
        initial_lexer_fuel=_LEXER_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=min(_MAX_STATES, _REQUEST_STATES // answers),
        max_grammar_size=_GRAMMAR_SIZE,
        precompute_large_lexemes=False,  # would fill each answer's memory before its first token
        verbose_errors=False,
    )
