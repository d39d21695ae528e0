"""Documents in messages: each part becomes an `OpenDocument` with its pages, before a template sees it.

{"type": "file", "file": {"file_data": "data:..."}, "pages": "1-3", "text_layer": true}    of clients
{"type": "document", "document": path or bytes, "pages": ...}                              of Python callers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from saccade.checkpoint.settings import setting
from saccade.errors import RequestError, quoted
from saccade.media.documents import Document, load_document
from saccade.media.pdf import CpuTime
from saccade.options.engine import MediaPolicy
from saccade.processor.images import ImageInput, reads_text_only

_OF_CLIENTS = ("file",)
_OF_CALLERS = ("file", "document")  # of Python, which may name paths


class OpenDocument(NamedTuple):
    """Stands in a part's place until the messages are read."""

    document: Document
    param: str
    detail: str
    heading: str  # text before the pages

    @property
    def images(self) -> list[ImageInput]:
        return [ImageInput(page, self.param, self.detail) for page in self.document.pages]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """What the template gets: each page an image, followed by its text if that was asked for."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": self.heading}] if self.heading else []
        for index in range(len(self.document.pages)):
            parts.append({"type": "image"})
            if self.document.texts:
                parts.append({"type": "text", "text": self.document.texts[index]})
        return parts


def open_documents(messages: Any, policy: MediaPolicy, *, takes_images: bool, allow_paths: bool) -> Any:
    """The messages with an `OpenDocument` for each document. May take seconds, in other processes.

    What is no list of messages is left to `read_messages`.
    """
    if not isinstance(messages, (list, tuple)):
        return messages
    opener = _Opener(policy, takes_images, allow_paths)
    return [opener.message(message, f"messages[{index}]") for index, message in enumerate(messages)]


@dataclass
class _Opener:
    policy: MediaPolicy
    takes_images: bool
    allow_paths: bool
    num_pages: int = 0  # of the documents opened so far
    time: CpuTime = field(default_factory=CpuTime)

    def message(self, message: Any, where: str) -> Any:
        match message:
            case {"content": list() | tuple() as content} if any(map(self.is_document, content)):
                pass
            case _:
                return message
        parts = [
            self.opened(part, f"{where}.content[{index}]") if self.is_document(part) else part
            for index, part in enumerate(content)
        ]
        return {**message, "content": parts}

    def is_document(self, part: Any) -> bool:
        if not isinstance(part, Mapping):
            return False
        return part.get("type") in (_OF_CALLERS if self.allow_paths else _OF_CLIENTS)

    def opened(self, part: Mapping[str, Any], where: str) -> OpenDocument:
        param = f"{where}.{part['type']}"
        if not self.takes_images:
            raise reads_text_only(1, param)
        text_layer = _field(part, where, "text_layer", False, "true or false")
        heading = _field(part, where, "heading", "", "a string")
        try:
            document = load_document(
                _source(part),
                self.policy,
                pages=part.get("pages"),
                text_layer=text_layer,
                allow_paths=part["type"] == "document",
                max_images=self.policy.limits.get("image", 0),
                num_before=self.num_pages,
                time=self.time,
            )
        except RequestError as error:
            raise RequestError(error.message, code=error.code, param=param) from None
        self.num_pages += len(document.pages)
        return OpenDocument(document, param, setting(part, "detail", "auto"), heading)


def _field(part: Mapping[str, Any], where: str, name: str, default: Any, expected: str) -> Any:
    value = default if part.get(name) is None else part[name]
    if not isinstance(value, type(default)):
        message = f"{name} must be {expected}, not {quoted(value)}"
        raise RequestError(message, param=f"{where}.{name}")
    return value


def _source(part: Mapping[str, Any]) -> Any:
    if part["type"] == "document":
        return part.get("document")
    match part.get("file"):
        case {"file_id": file_id} if file_id is not None:
            message = "file_id names a file that a server keeps; send file_data"
            raise RequestError(message, code="unsupported")
        case {"file_data": str() | bytes() as source}:
            return source
    message = "a file part needs an object with the PDF under file_data, as a data: URL"
    raise RequestError(message, code="invalid_document")
