"""What the Responses and the Messages API share: they build a chat and remember where each part came from.

An error of the chat then names the field that the client wrote. The paths hold no images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from saccade.server.request.chat import renaming

_PARAM = re.compile(r"messages\[(\d+)\](?:\.(content|tool_calls)\[(\d+)\])?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _MessagePaths:
    path: str
    is_leaf: bool  # the content is one string, and `path` is that of the string
    content: Sequence[str]  # path of each part
    tool_calls: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SourcePaths:
    """Maps fields of a chat to the fields of the client's request.

    `names` has the top-level fields with another name, `endings` what is replaced inside of a path, in order.
    """

    names: Mapping[str, str]
    endings: Sequence[tuple[str, str]]
    messages: list[_MessagePaths] = field(default_factory=list)

    def renaming(self) -> AbstractContextManager[None]:
        return renaming(self.original)

    def original(self, param: str) -> str:
        match = _PARAM.fullmatch(param)
        if match:
            path = self._of_message(match)
        else:
            name = re.split(r"[.\[]", param, maxsplit=1)[0]
            path = self.names.get(name, name) + param.removeprefix(name)
        for ending, theirs in self.endings:
            path = path.replace(ending, theirs)
        return path

    def _of_message(self, match: re.Match[str]) -> str:
        index, kind, part, ending = match.groups()
        message = self.messages[int(index)]
        if message.is_leaf and kind != "tool_calls":
            return message.path
        if kind is None:
            return message.path + ending
        parts = message.content if kind == "content" else message.tool_calls
        return parts[int(part)] + ending


@dataclass(frozen=True, slots=True)
class ChatBuilder:
    """Builds the messages of a chat from the items of another API."""

    source_paths: SourcePaths
    messages: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)  # of the assistant's message that follows

    def think(self, text: str) -> None:
        """Thinking that precedes what the assistant says or calls next."""
        if text:
            self.thoughts.append(text)

    def _take_thoughts(self) -> dict[str, Any]:
        """The field in which chat templates look for it."""
        text = "\n".join(self.thoughts)
        self.thoughts.clear()
        return {"reasoning_content": text} if text else {}

    def add_message(
        self, role: Any, content: Any, path: str, part_paths: Sequence[str] = (), **fields: Any
    ) -> None:
        """`part_paths` has the path of each part if the content is a list."""
        thoughts = self._take_thoughts()
        fields = {**thoughts, **fields} if role == "assistant" else fields
        self.messages.append({"role": role, "content": content, **fields})
        self.source_paths.messages.append(_MessagePaths(path, not isinstance(content, list), part_paths))

    def add_parts(
        self, role: Any, parts: Sequence[Any], path: str, convert: Callable[[Any, str], Any], **fields: Any
    ) -> None:
        """A message from a list at `path`. `convert` makes a chat's part of an entry and its path."""
        paths = [f"{path}[{index}]" for index in range(len(parts))]
        self.add_message(role, list(map(convert, parts, paths)), path, paths, **fields)

    def add_call(self, call_id: Any, name: Any, arguments: Any, path: str) -> None:
        """A tool call belongs to the preceding message if that is the assistant's; otherwise to a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self.thoughts:
            self.add_message("assistant", "", path)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.source_paths.messages[-1].tool_calls.append(path)


def document_options(part: Mapping[str, Any]) -> dict[str, Any]:
    """Our own fields of a document part, which have the same names in each API."""
    return {name: part[name] for name in ("pages", "text_layer", "detail") if part.get(name) is not None}
