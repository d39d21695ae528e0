"""Runs a checkpoint's chat template in a sandbox. Knows nothing of tokens, pictures or what a message may contain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from saccade.config import ConfigError
from saccade.types import RequestError


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """The conversation as the model was trained to read it."""
    compiled = _compile(required(template))
    try:
        return compiled.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, documents=None, **kwargs
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from None


def required(template: str | None) -> str:
    if template is None:
        raise ConfigError(
            "the checkpoint has no chat template; add chat_template.jinja to its folder or use plain prompts"
        )
    return template


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template has an error in line {error.lineno}: {error.message}") from None


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """What published templates rely on, and no more."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here its body simply passes through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it as a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """Jinja's own filter escapes HTML characters, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
