"""The dialects by name, and which one a chat template belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from saccade.errors import UsageError
from saccade.processor.dialects import deepseek, gemma, glm, hermes, llama, mistral, qwen3_coder
from saccade.processor.dialects.call_grammar import Function, GrammarWriter
from saccade.processor.dialects.events import EventSink, call_id
from saccade.processor.dialects.reader import Reading, TextReader
from saccade.processor.dialects.thinking import ThinkingDialect


class ToolDialect(NamedTuple):
    read: Callable[[TextReader, EventSink], Reading[None]]
    markers: tuple[str, ...] = ()  # shown to the parser where they are control tokens
    new_id: Callable[[], str] = call_id
    write: Callable[[GrammarWriter, Sequence[Function], bool], str] | None = None  # a grammar of its calls


_HERMES = ToolDialect(hermes.read_hermes, (hermes.OPEN, hermes.CLOSE), write=hermes.write_hermes)
_QWEN3_CODER = ToolDialect(qwen3_coder.read_qwen3_coder, _HERMES.markers, write=qwen3_coder.write_qwen3_coder)
_GLM = ToolDialect(glm.read_glm, glm.MARKERS, write=glm.write_glm)
_MISTRAL = ToolDialect(mistral.read_mistral, mistral.MARKERS, mistral.call_id, mistral.write_mistral)
_LLAMA = ToolDialect(llama.read_llama, llama.MARKERS, write=llama.write_llama)
_PYTHONIC = _LLAMA._replace(write=llama.write_pythonic)
_DEEPSEEK = ToolDialect(deepseek.read_deepseek, deepseek.MARKERS, write=deepseek.write_deepseek)
_DEEPSEEK_TAGS = ToolDialect(
    deepseek.read_deepseek_tags, (deepseek.DSML,), write=deepseek.write_deepseek_tags
)
_GEMMA4, _FUNCTION_GEMMA = (
    ToolDialect(partial(gemma.read, tags), tuple(tags), write=partial(gemma.write, tags))
    for tags in (gemma.GEMMA4, gemma.FUNCTION_GEMMA)
)
BARE = ToolDialect(hermes.read_bare)
"""An output that a grammar held to one call as JSON."""

TOOL_DIALECTS: Mapping[str, ToolDialect] = {
    "hermes": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "mistral": _MISTRAL,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK_TAGS,
    "glm45": _GLM,
    "glm47": _GLM,
    "gemma4": _GEMMA4,
    "functiongemma": _FUNCTION_GEMMA,
}
"""Some have two names: vLLM's, and that of a later model."""

_THINK = ThinkingDialect("<think>", "</think>")
THINKING_DIALECTS: Mapping[str, ThinkingDialect] = {
    "think": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_r1": _THINK._replace(always=True),
    "mistral": ThinkingDialect("[THINK]", "[/THINK]"),
    "gemma4": ThinkingDialect("<|channel>", "<channel|>", label="thought"),
}

# What only the templates of one dialect contain; the first that is found counts.
_TOOL_SIGNS = (
    (gemma.GEMMA4.open, "gemma4"),
    (gemma.FUNCTION_GEMMA.open, "functiongemma"),
    (deepseek.DSML, "deepseek_v32"),
    (deepseek.CALLS, "deepseek_v3"),
    (glm.KEY, "glm45"),
    (qwen3_coder.FUNCTION, "qwen3_coder"),
    (mistral.CALLS, "mistral"),
    (hermes.OPEN, "hermes"),
    (llama.PYTHON_TAG, "llama3_json"),
    ("<|python_start|>", "llama4_pythonic"),
    ('"parameters": dictionary', "llama3_json"),
    ("[func_name1(", "pythonic"),
)
_THINKING_SIGNS = (
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("<think>", "think"),
    ("</think>", "think"),
)

_Dialect = TypeVar("_Dialect", ToolDialect, ThinkingDialect)


def tool_dialect(name: str, template: str | None) -> ToolDialect | None:
    """The dialect by name, or for `auto` by the chat template, else Hermes. None for `none`."""
    return _find("tool_call_parser", name, TOOL_DIALECTS, _sign(_TOOL_SIGNS, template, "hermes"))


def thinking_dialect(name: str, template: str | None) -> ThinkingDialect | None:
    """The same for thinking; None where the template knows none."""
    return _find("reasoning_parser", name, THINKING_DIALECTS, _sign(_THINKING_SIGNS, template, None))


def _sign(signs: tuple[tuple[str, str], ...], template: str | None, default: str | None) -> str | None:
    return next((name for sign, name in signs if sign in (template or "")), default)


def _find(option: str, name: str, dialects: Mapping[str, _Dialect], automatic: str | None) -> _Dialect | None:
    if name == "auto":
        return dialects[automatic] if automatic else None
    if name != "none" and name not in dialects:
        raise UsageError(f"{option} must be auto, none or one of {', '.join(dialects)}, not {name!r}")
    return dialects.get(name)
