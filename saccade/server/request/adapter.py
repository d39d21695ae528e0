"""What other APIs have in common on their way to a chat: the chat so far, and where each piece of it came from.

The places outlive the messages: an error found late still names what the client wrote, and no picture is kept for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import RequestError

_PARAM = re.compile(r"messages\[(\d+)\](?:\.(content|tool_calls)\[(\d+)\])?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Place:
    where: str
    is_leaf: bool  # the message's content is one string, and `where` is that string
    content: Sequence[str]
    tool_calls: list[str] = field(default_factory=list)


class SourcePaths:
    """Names of a chat's parts in the client's own words.

    `names` has the fields that are called differently; `endings` what is replaced inside a name, in order.
    """

    def __init__(self, names: Mapping[str, str], endings: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self._endings = endings
        self.messages: list[_Place] = []

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """RequestErrors that leave this context speak of the client's fields."""
        try:
            yield
        except RequestError as error:
            if error.param is None:
                raise
            raise error.renamed(self.original(error.param)) from None

    def original(self, param: str) -> str:
        match = _PARAM.fullmatch(param)
        found = self._of_message(match) if match else self._of_field(param)
        for ending, theirs in self._endings:
            found = found.replace(ending, theirs)
        return found

    def _of_field(self, param: str) -> str:
        name = re.split(r"[.\[]", param, maxsplit=1)[0]
        return self._names.get(name, name) + param.removeprefix(name)

    def _of_message(self, match: re.Match[str]) -> str:
        place = self.messages[int(match[1])]
        if place.is_leaf and match[2] != "tool_calls":
            return place.where
        if match[2] is None:
            return place.where + match[4]
        parts = place.content if match[2] == "content" else place.tool_calls
        return parts[int(match[3])] + match[4]


class Chat:
    """Messages of a chat, put together from another API's items."""

    def __init__(self, places: SourcePaths) -> None:
        self.places = places
        self.messages: list[dict[str, Any]] = []

    def say(self, role: Any, content: Any, where: str, parts: Sequence[str] = (), **more: Any) -> None:
        """`parts` says where each part of a list came from. Content of any other kind came from `where` itself."""
        self.messages.append({"role": role, "content": content, **more})
        self.places.messages.append(_Place(where, not isinstance(content, list), parts))

    def call(self, call_id: Any, name: Any, arguments: Any, where: str) -> None:
        """A call belongs to the assistant's message before it, or begins one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.say("assistant", "", where)
        function = {"name": name, "arguments": arguments}
        self.messages[-1].setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self.places.messages[-1].tool_calls.append(where)
