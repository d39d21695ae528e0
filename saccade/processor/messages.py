"""OpenAI chat messages: validation, media extraction, and conversion to what a chat template takes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from saccade.checkpoint.settings import setting
from saccade.errors import RequestError, is_list_of, quoted
from saccade.media.video_sources import Video
from saccade.processor.documents import OpenDocument
from saccade.processor.images import ImageInput
from saccade.processor.template_pool import TemplateEnded, TemplatePool
from saccade.processor.tools import calls_for_template

ROLES = ("system", "developer", "user", "assistant", "tool")
_PROBE = "5a17c3"
_END = secrets.token_hex(16)  # no client can know it
_MAX_DEPTH = 64  # far more than any tool schema, far less than the interpreter's stack


class Chat(NamedTuple):
    messages: list[dict[str, Any]]  # for the template; every string has passed through `clean`
    images: list[ImageInput]  # in prompt order
    videos: list[Video]  # in prompt order


class Form(NamedTuple):
    """Which forms of `content` a template takes (vLLM: chat template content format)."""

    takes_strings: bool
    takes_parts: bool


def read_messages(messages: Any, form: Form, clean: Callable[[str], str], *, allow_paths: bool) -> Chat:
    """Check the messages, take the media out, and convert the rest to the form the template takes."""
    if not is_list_of(messages, object, 1):
        raise RequestError("messages must be a list with at least one message", param="messages")
    chat = Chat([], [], [])
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_role(message, where)
        fields = {k: v for k, v in message.items() if k != "content"}
        if isinstance(fields.get("reasoning"), str):  # the newer name, which few templates know
            fields.setdefault("reasoning_content", fields["reasoning"])
        if fields.get("tool_calls"):
            fields["tool_calls"] = calls_for_template(fields["tool_calls"], f"{where}.tool_calls")
        parts = _parts(message.get("content"), where, chat, allow_paths)
        content = cleaned(_in_form(parts, form), clean)
        chat.messages.append({**cleaned(fields, clean), "content": content})
    return chat


def mark_end(messages: list[dict[str, Any]]) -> None:
    """Put a mark after the text of the last message, an assistant's, which the model goes on with."""
    last = messages[-1]
    if last["role"] != "assistant":
        reason = f"the last message is of the role {quoted(last['role'])}, and only an assistant's can go on"
        raise RequestError(f"continue_final_message: {reason}", param="continue_final_message")
    if isinstance(last["content"], list):
        last["content"] = [*last["content"], {"type": "text", "text": _END}]
    else:
        last["content"] = (last["content"] or "") + _END


def cut_at_mark(rendered: str) -> str:
    """The text before the mark: without what the template writes after a message."""
    before, mark, _ = rendered.partition(_END)
    if not mark:
        reason = "the chat template does not show the last message as it is"
        raise RequestError(f"continue_final_message: {reason}", param="continue_final_message")
    return before


def cleaned(value: Any, clean: Callable[[str], str], depth: int = _MAX_DEPTH) -> Any:
    """A deep copy with every string, keys included, passed through `clean`. Only JSON values are allowed."""
    if depth == 0:
        message = f"messages and tools may be nested at most {_MAX_DEPTH} levels deep"
        raise RequestError(message, param="messages")
    if isinstance(value, str):
        return clean(str(value))
    if isinstance(value, Mapping):
        return {cleaned(k, clean, depth - 1): cleaned(v, clean, depth - 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(v, clean, depth - 1) for v in value]
    if isinstance(value, bool | int | float | None):
        return value
    message = f"messages and tools hold plain JSON values, not {type(value).__name__}"
    raise RequestError(message, param="messages")


def form_of(template_pool: TemplatePool) -> Form:
    """Probe the template: some published ones silently drop a string, others print a list or fail on it.

    A template that refuses both probes gets the content as the client sent it.
    """
    strings = _shows(template_pool, _PROBE)
    parts = _shows(template_pool, [{"type": "text", "text": _PROBE}])
    return Form(not parts if strings is None else strings, not strings if parts is None else parts)


def _shows(template_pool: TemplatePool, content: Any) -> bool | None:
    """Whether the template renders this content; None if it refuses it."""
    try:
        rendered = template_pool.render(messages=[{"role": "user", "content": content}])
    except TemplateEnded:
        raise  # a timeout says nothing about the form
    except RequestError:
        return None
    return _PROBE in rendered and "'type'" not in rendered


def _check_role(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:
        roles = ", ".join(ROLES)
        raise RequestError(f"the role {quoted(role)} is unknown; use one of {roles}", param=f"{where}.role")


def _parts(content: Any, where: str, chat: Chat, allow_paths: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, OpenDocument):
            chat.images.extend(part.images)
            parts += part.parts
        else:
            parts.append(_part(part, f"{where}.content[{index}]", chat, allow_paths))
    return parts


def _part(part: Any, where: str, chat: Chat, allow_paths: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "text"}:
            raise RequestError("a text part needs a string under text", param=f"{where}.text")
        case {"type": "image_url"}:
            chat.images.append(_linked(part.get("image_url"), f"{where}.image_url"))
            return {"type": "image"}
        case {"type": "image"}:
            chat.images.append(_given(part, f"{where}.image", allow_paths))
            return {"type": "image"}
        case {"type": "video_url"}:
            chat.videos.append(_linked_video(part.get("video_url"), f"{where}.video_url"))
            return {"type": "video"}
        case {"type": "video"}:
            chat.videos.append(_given_video(part.get("video"), f"{where}.video", allow_paths))
            return {"type": "video"}
        case {"type": kind}:
            pass
        case _:
            kind = None
    kinds = "text, image_url, image, video_url, video or file"
    message = f"the part type {quoted(kind)} is unknown; use {kinds}"
    raise RequestError(message, param=f"{where}.type")


def _linked_video(link: Any, where: str) -> Video:
    """A URL, or the bytes that the server fetched from it."""
    match link:
        case {"url": str() | bytes() as source} | (str() | bytes() as source):
            return Video(source, where, allow_path=False)
    message = "a video_url part needs the video under video_url"
    raise RequestError(message, code="invalid_video", param=where)


def _given_video(source: Any, where: str, allow_path: bool) -> Video:
    """Any video object of a Python caller."""
    if source is None:
        raise RequestError("a video part needs the video under video", code="invalid_video", param=where)
    return Video(source, where, allow_path)


def _linked(link: Any, where: str) -> ImageInput:
    """An image_url part: a URL, alone or with `detail`, or the bytes that the server fetched from it."""
    match link:
        case str():
            return ImageInput(link, where, allow_path=False)
        case {"url": str() | bytes() as url}:
            return ImageInput(url, where, setting(link, "detail", "auto"), allow_path=False)
    message = "image_url needs an object with a string under url"
    raise RequestError(message, code="invalid_image_url", param=where)


def _given(part: Mapping[str, Any], where: str, allow_paths: bool) -> ImageInput:
    """An image object of a Python caller."""
    if part.get("image") is None:
        raise RequestError("an image part needs the picture under image", code="invalid_image", param=where)
    return ImageInput(part["image"], where, setting(part, "detail", "auto"), allow_paths)


def _in_form(content: str | list[dict[str, Any]], form: Form) -> str | list[dict[str, Any]]:
    if form.takes_strings == form.takes_parts:
        return content
    if isinstance(content, str):
        return content if form.takes_strings else [{"type": "text", "text": content}]
    return content if form.takes_parts else "".join(part.get("text", "") for part in content)
