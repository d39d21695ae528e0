"""How a JSON schema becomes a grammar. Both sides need it: the server checks with it what the engine will compile.

Knows no tokenizer, no request and no torch. The compiler, llguidance, has no wheel for some machines: it is imported
where it is used, so that everything but structured output works without it.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

UNAVAILABLE = "answers cannot be held to a JSON schema here: llguidance is not installed on this machine"

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

_LEXER_FUEL = 1_000_000  # about 20 ms of work when a grammar is compiled
_STEP_FUEL = 200_000  # about 15 ms per token; a typical token takes 0.03 ms
_STEP_ITEMS = 50_000
_LEXER_STATES = 100_000  # up to 2 kB each
_GRAMMAR_SIZE = 200_000


def is_available() -> bool:
    return find_spec("llguidance") is not None


def grammar_of(schema: str) -> str:
    """The grammar of one JSON value that follows `schema`; ValueError if that is no JSON object.

    Options in the schema itself (`x-guidance`) are overruled: they come from a client.
    """
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(json.loads(schema), overrides=_OPTIONS)  # type: ignore[arg-type]
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def limits() -> LLParserLimits:
    """What one grammar may take. Past a limit a matcher stops with an error; it never runs on."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SIZE,
        verbose_errors=False,
    )
