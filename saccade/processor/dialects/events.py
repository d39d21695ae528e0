"""What a parser finds in an output: thinking, text and tool calls, in order. Knows no dialect."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.processor.dialects.arguments import fits, parameters_of, parsed_object
from saccade.processor.dialects.reader import Problem


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thinking."""

    text: str

    def delta(self) -> dict[str, Any]:
        """The delta of an OpenAI chunk. Clients read one of the two names."""
        return {"reasoning_content": self.text, "reasoning": self.text}


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of text that is neither thinking nor part of a call."""

    text: str

    def delta(self) -> dict[str, Any]:
        return {"content": self.text}


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str

    def delta(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": ""}
        call = {"index": self.index, "id": self.id, "type": "function", "function": function}
        return {"tool_calls": [call]}


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A call's arguments as JSON text, appended to what came before for this index."""

    index: int
    text: str

    def delta(self) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.index, "function": {"arguments": self.text}}]}


@dataclass(frozen=True, slots=True)
class CallProblem:
    """A call that is broken or not what was asked for. What was read of it is told by other events."""

    reason: Problem


_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON can only hold as an escape

OutputEvent = Reasoning | Content | CallStart | CallArguments | CallProblem


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class EventSink:
    """Where dialects write what they read. Neighbouring pieces of one kind become one event.

    White space around thinking and calls is dropped; other text stays as it is.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), new_id: Callable[[], str] = call_id) -> None:
        self.parameters = parameters_of(tools)  # by the name of the tool
        self.in_call = False
        self.num_calls = 0
        self._new_id = new_id
        self._events: list[OutputEvent] = []
        self._space: list[str] = []  # of a text, told only if more of it follows
        self._drops_space = False  # until the next letter
        self._name = ""  # of the open call
        self._arguments: list[str] = []  # of the open call

    def take(self) -> list[OutputEvent]:
        events = self._events
        self._events = []
        return events

    @property
    def is_idle(self) -> bool:
        """Text would pass as it is."""
        return not self._space and not self._drops_space

    def reasoning(self, text: str) -> None:
        if content := self._without_outer_space(text):
            self._add_text(Reasoning, content)

    def content(self, text: str) -> None:
        if content := self._without_outer_space(text):
            self._add_text(Content, content)

    def begin_text(self) -> None:
        """Thinking begins or has ended: white space here belongs to nothing."""
        self._space = []
        self._drops_space = True

    def start(self, name: str) -> None:
        self._space = []
        self._drops_space = False
        self._name = name
        self._arguments = []
        self.in_call = True
        self._events.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if not text:
            return
        text = _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
        self._arguments.append(text)
        match self._events:
            case [*_, CallArguments(index, before)]:
                self._events[-1] = CallArguments(index, before + text)
            case _:
                self._events.append(CallArguments(self.num_calls - 1, text))

    def end(self, problem: Problem | None = None) -> None:
        """The call is over. Its arguments are checked against the parameters of its tool."""
        self.in_call = False
        if problem is None:
            problem = self._problem()
        self._arguments = []
        if problem is not None:
            self._events.append(CallProblem(problem))

    def refuse(self, raw: str, problem: Problem | None) -> None:
        """What looked like the beginning of a call is none. It is told as text."""
        if problem is not None:
            self._events.append(CallProblem(problem))
        self.content(raw)

    def finish(self) -> None:
        """The output has ended. White space at the end of a text without calls is part of it."""
        if self._space and not self.num_calls:
            self._add_text(Content, "".join(self._space))
        self._space = []

    def _problem(self) -> Problem | None:
        if self._name not in self.parameters:
            return "unknown_tool"
        arguments = parsed_object("".join(self._arguments))
        if arguments is None:
            return "syntax"
        if not fits(arguments, self.parameters[self._name]):
            return "schema"
        return None

    def _without_outer_space(self, text: str) -> str:
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        if not text.strip():  # a list, since a model may write nothing else for a long time
            self._space += [text] if text else []
            return ""
        content = text.rstrip()
        words = "".join(self._space) + content
        self._space = [text[len(content) :]] if len(text) > len(content) else []
        return words

    def _add_text(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        last = next(reversed(self._events), None)
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))
