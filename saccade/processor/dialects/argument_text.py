"""Arguments that a dialect writes one by one as plain text: passed on as the members of a JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence

from saccade.processor.dialects.arguments import as_json, types_of
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.reader import Emit, Reading, TextReader, Unreadable


class ArgumentWriter:
    """Opens a call; then `key` and `copy_text` for each argument, and `close`."""

    def __init__(self, sink: EventSink, name: str) -> None:
        self._sink = sink
        self._parameters = sink.parameters.get(name, {})
        self._types: frozenset[str] = frozenset()  # of the argument
        self._is_empty = True
        sink.start(name)

    def key(self, name: str) -> None:
        properties = self._parameters.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        self._types = types_of(schema, self._parameters)
        self._sink.arguments(("{" if self._is_empty else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._is_empty = False

    def value(self, text: str) -> None:
        """A value as JSON."""
        self._sink.arguments(text)

    def copy_text(
        self, reader: TextReader, ends: Sequence[str], *, is_string: bool | None = None, lines: bool = False
    ) -> Reading[str]:
        """A value as plain text up to one of `ends`, which is returned. Strings are passed on as they come.

        `is_string` overrides the schema; `lines`: a line break at each end is not part of the value.
        """
        streams = self._types == {"string"} if is_string is None else is_string
        pieces: list[str] = []
        emit: Emit = pieces.append
        if streams:
            self._sink.arguments('"')
            emit = self._escape
        if lines:
            emit = _Trimmed(emit)
        end = yield from reader.copy_until(ends, emit)
        if not end:
            self._sink.arguments("".join(pieces))
            raise Unreadable("incomplete")
        types = frozenset[str]() if is_string is False else self._types
        self._sink.arguments('"' if streams else as_json("".join(pieces), types))
        return end

    def close(self) -> None:
        self._sink.arguments("{}" if self._is_empty else "}")
        self._sink.end()

    def _escape(self, text: str) -> None:
        self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class _Trimmed:
    """Drops a line break at the beginning and one at the end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._is_first = True
        self._held = ""  # a break, which is dropped if it is the last

    def __call__(self, text: str) -> None:
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._emit(text.removesuffix("\n"))
