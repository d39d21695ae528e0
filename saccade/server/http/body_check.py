"""Decodes a body and checks what a count of its bytes cannot tell: nesting, and where its text stands.

Small bodies are checked in the server, heavy ones in a process (`body_worker`). Knows no route.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from saccade.errors import RequestError, member

MAX_DEPTH = 128
"""Levels of nesting in a body: more than any schema needs, far less than the interpreter's stack."""
MAX_FIELDS = 1000
"""At the top of a body. All APIs together have less than 200."""
MAX_MEMBERS = 250_000
"""Members of all lists and objects in a field that is no prompt: far more than any tool or chat has."""

_MEDIA_LISTS = ("messages", "input", "system")
_MEDIA_FIELDS = ("image_url", "video_url", "image", "video", "source")


class BodyLimits(NamedTuple):
    max_chars: int
    inputs: tuple[str, ...] = ()  # fields of several prompts or token ids, which have their own limits


def decoded(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object in a body. Of duplicate keys the last one counts, as in every JSON library."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise _invalid("the body is not valid JSON in UTF-8") from None
    if not isinstance(value, dict):
        names = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
        name = names.get(type(value), "a number")
        raise _invalid(f"the body must be a JSON object, not {name}")
    if len(value) > MAX_FIELDS:
        message = f"the body has {len(value)} fields and may have {MAX_FIELDS}; leave out unknown ones"
        raise RequestError(message, code="request_too_large")
    return value


def check(body: Mapping[str, Any], limits: BodyLimits) -> None:
    """RequestError if it is nested too deeply, or its text has more characters than a context."""
    inputs = [body[name] for name in limits.inputs if name in body]
    for value in inputs:
        _num_chars(value, set(), None)
    check_text({name: value for name, value in body.items() if name not in limits.inputs}, limits.max_chars)


def check_text(body: Mapping[str, Any], limit: int) -> None:
    """RequestError if the strings and keys of a body have more than `limit` characters.

    Other values count as one character. Data URLs count only where no image can be, or if they are not ASCII.
    """
    media = {id(text) for text in _media(body) if text.isascii()}
    count = 0
    for name, value in body.items():
        count += len(name) + _num_chars(value, media, limit - count)
        check_chars(count, limit, name[:64])


def check_chars(count: int, limit: int, param: str) -> None:
    """Refuses text that cannot fit the context, before it is tokenized."""
    if count > limit:
        size = f"the request has more than {limit} characters of text"
        message = f"{size}, more than the context can hold; send less or raise --max-model-len"
        raise RequestError(message, code="context_length_exceeded", param=param)


def _counted(count: int, members: int) -> int:
    if members > MAX_MEMBERS:
        message = f"a field of the body has more than {MAX_MEMBERS} members in its lists and objects"
        raise RequestError(f"{message}; send a smaller request", code="request_too_large")
    return count


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")


def _num_chars(value: Any, media: set[int], enough: int | None) -> int:
    """Stops above `enough`, so that counting takes no longer than the limit allows.

    Goes level by level, so that nesting costs no stack. The body itself is the first level. `enough` None:
    the field has limits of its own.
    """
    if isinstance(value, str):
        return 0 if id(value) in media else len(value)
    if not isinstance(value, (dict, list)):
        return 0
    members = 0
    count = 0
    level = [value]
    for _ in range(MAX_DEPTH - 1):
        inner: list[Any] = []
        for container in level:
            values: Iterable[Any] = container
            if isinstance(container, dict):
                values = container.values()
                count += sum(map(len, container))
            count += len(container)
            members += len(container)
            if enough is not None and (count > enough or members > MAX_MEMBERS):
                return _counted(count, members)
            texts = (text for text in values if isinstance(text, str))
            count += sum(len(text) for text in texts if id(text) not in media)
            inner += [value for value in values if isinstance(value, (dict, list))]
        level = inner
        if not level:
            return count
    raise _invalid(f"the body is nested more than {MAX_DEPTH} levels deep")


def _media(body: Mapping[str, Any]) -> Iterator[str]:
    """Strings of content parts that are read as images, videos or PDFs. A template never prints these."""
    for name in _MEDIA_LISTS:
        for entry in _entries(body.get(name)):
            if name == "system":
                yield from _media_of_part(entry)
            else:
                yield from _media_of_parts(member(entry, "content"))
                yield from _media_of_parts(member(entry, "output"))


def _entries(value: Any) -> Sequence[Any]:
    """None where there is no list."""
    return value if isinstance(value, list) else ()


def _media_of_parts(parts: Any) -> Iterator[str]:
    for part in _entries(parts):
        yield from _media_of_part(part)
        yield from _media_of_parts(member(part, "content"))  # of a tool result


def _media_of_part(part: Any) -> Iterator[str]:
    if not isinstance(part, dict):
        return
    if part.get("type") in ("file", "input_file"):  # of a chat, or of the Responses API
        data = member(part.get("file", part), "file_data")
        if isinstance(data, str):
            yield data
    for name in _MEDIA_FIELDS:
        media = part.get(name)
        url = media.get("url") if isinstance(media, dict) else media
        if isinstance(url, str) and url[:5].lower() == "data:":
            yield url
    source = part.get("source")
    data = member(source, "data")
    if isinstance(data, str) and member(source, "type") != "text":
        yield data
