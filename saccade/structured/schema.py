"""The structured output backend (llguidance): JSON schema or Lark grammar to matcher, and its limits.

llguidance has no wheel for some machines, so it is imported lazily.
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

# A bound, as unsure models write white space without end. It is enough for any indented or compact style.
_WHITESPACE = r"[ ]{1,2}|\n[ ]{0,32}"
JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,  # an approximated oneOf would allow outputs that the schema forbids
    "lenient": False,  # and so would ignored keywords
}
# Forced tokens are tokenized for every token, outside of all limits: 50 ms a token for ^a{120000}$. Without
# forcing the model samples them one by one.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'

# With a vocabulary of 150,000 tokens typical schemas took at most 16,000 of fuel, 5,400 items a token, rows
# of 1,600 items and a grammar of 21,000 (128 tools of 30 arguments).
_LEXER_FUEL = 1_000_000  # to compile a grammar, about half a second
_STEP_FUEL = 50_000  # for each token, about 25 ms
_STEP_ITEMS = 8_000  # also bounds the cost of accepting a token inside of a step: 20 ms
_ROW_ITEMS = 2_000
_GRAMMAR_SIZE = 50_000
# Up to 1 kB each. Each output has its own, so the outputs of one request share its limit.
_REQUEST_STATES = 256_000
_MAX_STATES = 32_000


def is_available() -> bool:
    return unavailable() is None


def unavailable() -> str | None:
    """Why structured output is unavailable, as a sentence; None if it is available."""
    try:
        library = import_module("llguidance")
    except ImportError:
        return "answers cannot be held to a structure here: llguidance is not installed on this machine"
    if _works(library):
        return None
    reason = "the llguidance on this machine does not work with Saccade"
    remedy = f"install llguidance {MIN_VERSION} or newer"
    return f"answers cannot be held to a structure here: {reason}; {remedy}"


@lru_cache(maxsize=4)
def _works(library: ModuleType) -> bool:
    """Whether this version has what is needed: a trial on bytes, of a few milliseconds."""
    try:
        tokenizer = library.LLTokenizer("byte")
        schema = '{"type":"array","items":{"const":7},"minItems":1}'
        matcher = compiled(tokenizer, schema, answers=1).deep_copy()
        is_bounded = matcher.deep_copy().try_consume_tokens([*b"[   7]"]) == 3  # white space is
        return is_bounded and bool(tokenizer.eos_tokens) and matcher.try_consume_tokens([*b"[  7]"]) == 5
    except Exception:  # another version may fail in any way
        return False


def compiled(tokenizer: LLTokenizer, structured: str, answers: int) -> LLMatcher:
    """A matcher of one output, for a request of so many. ValueError if a schema is no JSON object; what is
    too complex makes a matcher with an error.
    """
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, grammar_of(structured), log_level=0, limits=limits(answers))


def is_schema(structured: str) -> bool:
    """Whether it is a JSON schema and no Lark grammar, which never begins with a brace."""
    return structured.lstrip().startswith("{")


def grammar_of(structured: str) -> str:
    """The grammar as the engine compiles it: as given, or of one JSON value that matches the schema."""
    if not is_schema(structured):
        return _NO_FORCING + structured
    rules = json.loads(rules_of(structured))["grammars"][0]["json_schema"]
    return f"{_NO_FORCING}start: %json {json.dumps(rules)}"


def rules_of(schema: str) -> str:
    """The schema part alone, which gives clearer errors. ValueError if the schema is no JSON object.

    Options inside the schema (`x-guidance`) are overridden, since they come from a client.
    """
    from llguidance import LLMatcher

    try:
        fields: dict[str, Any] = json.loads(schema)
        return LLMatcher.grammar_from_json_schema(fields, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def limits(answers: int = 1) -> LLParserLimits:
    """Limits of one of a request's outputs. Past a limit a matcher stops with an error."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_ROW_ITEMS,
        initial_lexer_fuel=_LEXER_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=min(_MAX_STATES, _REQUEST_STATES // answers),
        max_grammar_size=_GRAMMAR_SIZE,
        precompute_large_lexemes=False,  # would fill each output's memory before its first token
        verbose_errors=False,
    )
