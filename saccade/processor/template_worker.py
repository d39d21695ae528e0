"""The process that renders chats: `python -m saccade.processor.template_worker MAX_CHARS NICENESS`.

A template may loop forever or fill the memory, so each chat has a limit of CPU seconds and the process one of
memory. What cannot be interrupted, such as a huge power, ends with the process.

    T, template ─► nothing, or refused: why it cannot be compiled, for the operator
    C, JSON     ─► the chat as text, or refused: a code and why, for the client
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from saccade.errors import ConfigError, RequestError
from saccade.helpers.main import AnswerRefused, limit_memory, serve
from saccade.processor.template import compile_template, render

MEMORY_MB = 768  # of address space: the interpreter alone takes a few dozen, on some systems 250
TEMPLATE, CHAT = b"T", b"C"
REFUSED, TOO_LONG = b"R", b"L"


def encoded(text: str) -> bytes:
    """Lone surrogates pass; the tokenizer refuses them later with an error of its own."""
    return text.encode("utf-8", "surrogatepass")


def decoded(body: bytes) -> str:
    return body.decode("utf-8", "surrogatepass")


class _Renderer:
    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars  # of a rendered chat
        self._template: str | None = None

    def answer(self, body: bytes, fds: Sequence[int]) -> bytes:
        text = decoded(body[1:])
        try:
            return encoded(self._rendered(text) if body[:1] == CHAT else self._compiled(text))
        except RequestError as error:
            raise AnswerRefused((TOO_LONG if error.code else REFUSED) + encoded(error.message)) from None
        except ConfigError as error:
            raise AnswerRefused(encoded(str(error))) from None

    def _compiled(self, template: str) -> str:
        compile_template(template)
        self._template = template
        return ""

    def _rendered(self, context: str) -> str:
        values: dict[str, Any] = json.loads(context)
        return render(self._template, values.pop("messages"), self._max_chars, **values)


def main() -> None:
    max_chars, niceness = map(int, sys.argv[1:])
    os.nice(niceness)
    limit_memory(MEMORY_MB)
    serve(_Renderer(max_chars).answer, is_python=True)


if __name__ == "__main__":
    main()
