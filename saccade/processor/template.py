"""Chat template rendering in a Jinja sandbox.

The sandbox does not bound time or memory: `template_pool` runs it in another process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from saccade.errors import ConfigError, RequestError

SHOWN_CHARS = 500  # of a template's error message
MAX_CHARS = 1 << 20
MAX_REASON = 1 << 16  # characters
_OPENAI_FIELDS = {"messages", "tools", "documents", "add_generation_prompt", "template", "tokenize"}
_JINJA_NAMES = {"self", "super", "caller", "loop", "varargs", "kwargs"}
_GLOBALS = {"range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"}
RESERVED = frozenset(_OPENAI_FIELDS | _JINJA_NAMES | _GLOBALS)
"""Names that chat_template_kwargs may not set."""


class _Refusal(jinja2.TemplateError):
    """Raised by the template's own raise_exception."""


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    max_chars: int = MAX_CHARS,
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """The chat as text in the model's own format."""
    compiled = compile_template(required(template))
    how = {"tools": tools, "add_generation_prompt": add_generation_prompt, "documents": None}
    try:
        return _joined(compiled.generate({**kwargs, **how, "messages": messages}), max_chars)
    except (RequestError, MemoryError):
        raise
    except _Refusal as error:
        reason = str(error)
        if len(reason) > MAX_REASON:  # not cut: a shield marker inside must stay whole
            reason = f"it says why in more than {MAX_REASON} characters"
    except RecursionError:
        reason = "its macros call each other too deeply"
    except Exception as error:  # a template can raise anything; the library's text would not help a client
        reason = f"line {_line(error.__traceback__, compiled)} of it cannot work with them"
    raise RequestError(f"the model's chat template refuses these messages: {reason}", param="messages")


def required(template: str | None) -> str:
    if template is None:
        remedy = "add chat_template.jinja to its folder or use plain prompts"
        raise ConfigError(f"the checkpoint has no chat template; {remedy}")
    return template


@lru_cache(maxsize=8)
def compile_template(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template has an error in line {error.lineno}: {error.message}") from None
    except MemoryError:
        raise
    except Exception as error:  # Python's compiler has several errors for blocks nested too deeply
        raise ConfigError(f"the chat template cannot be compiled ({type(error).__name__}: {error})") from None


def _joined(pieces: Iterable[str], maximum: int) -> str:
    texts: list[str] = []
    room = maximum
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            reason = f"the model's chat template writes more than {maximum} characters for these messages"
            raise RequestError(f"{reason}; send less", code="context_length_exceeded", param="messages")
        texts.append(piece)
    return "".join(texts)


def _line(traceback: TracebackType | None, template: jinja2.Template) -> int:
    """The template's line of an error; Jinja puts its own lines into the traceback."""
    line = 1
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == (template.filename or "<template>"):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """The filters and globals that published templates rely on, as Transformers provides them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks assistant tokens for training; inference renders its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it as a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)
