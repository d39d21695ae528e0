"""Media of a chat before its prompt is built: counted, fetched or cached. Decodes nothing.

messages ─► links (counted, refused early) ─► bytes (fetched or cached) ─► messages for the processor
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from saccade.errors import RequestError, member, quoted
from saccade.media.documents import decode_document, is_pdf
from saccade.media.fetch import Fetcher, OnBytes
from saccade.media.load import decode_data_url
from saccade.options.engine import MediaPolicy
from saccade.processor.images import reads_text_only
from saccade.server.metrics import Metrics
from saccade.server.request.media_files import StoredFiles
from saccade.server.request.media_uuids import MAX_UUID_CHARS, UuidCache

Messages = Sequence[Mapping[str, Any]]
Fetched = Mapping[tuple[str, str], bytes]  # by URL and kind, as each kind has its own limits; or by file id

_STORED = "file_id"  # in place of a kind
_SCHEME_CHARS = 12
_KINDS = {"image_url": "picture", "video_url": "video", "file": "document"}  # part types, and in words
_DATA_FORMAT = re.compile(r"data:image/([a-z]{2,8})[;,]", re.IGNORECASE)


class Link(NamedTuple):
    """An image, video or file part of a message, as the client wrote it."""

    message: int
    part: int
    url: str  # empty: only a uuid or a stored file is named
    uuid: str | None
    kind: str = "image_url"  # or "video_url" or "file"
    file_id: str | None = None  # of a stored file

    @property
    def param(self) -> str:
        return f"messages[{self.message}].content[{self.part}].{self.kind}"

    @property
    def is_video(self) -> bool:
        return self.kind == "video_url"

    @property
    def is_data(self) -> bool:
        """A URL with the bytes in it; for a file also bare base64."""
        if self.url[:5].lower() == "data:":
            return True
        return self.kind == "file" and self.url != "" and ":" not in self.url[:_SCHEME_CHARS]

    @property
    def is_remote(self) -> bool:
        """The bytes must be fetched."""
        return self.url != "" and not self.is_data

    @property
    def claimed_format(self) -> str | None:
        """The format in a data URL, for metrics only: the format is read from the bytes."""
        match = _DATA_FORMAT.match(self.url)
        return match[1].lower().replace("jpg", "jpeg") if match else None


class ChatLimits(NamedTuple):
    max_parts: int  # messages and parts together
    max_images: int | None  # None: the model takes none
    max_videos: int | None = None  # None: the processor refuses videos


def find_links(messages: Messages, limits: ChatLimits) -> list[Link]:
    """The media of a chat. RequestError if there are too many. The processor checks their form."""
    links: list[Link] = []
    num_parts = len(messages)
    for index, message in enumerate(messages):
        content = member(message, "content")
        parts = content if isinstance(content, list) else [content]
        num_parts += len(parts)
        if num_parts > limits.max_parts:
            count = f"more than {limits.max_parts} messages and parts"
            raise RequestError(f"the request has {count}, which is the limit (--max-parts)", param="messages")
        for position, part in enumerate(parts):
            if member(part, "type") in _KINDS:
                links.append(_link(part, index, position))
    num_videos = sum(link.is_video for link in links)
    num_images = len(links) - num_videos  # a document has at least one, and the processor counts its pages
    if num_images and limits.max_images is None:
        raise reads_text_only(num_images, "messages")
    _check_count("image", num_images, limits.max_images)
    _check_count("video", num_videos, limits.max_videos)
    return links


def _link(part: Mapping[str, Any], message_index: int, position: int) -> Link:
    kind = part["type"]
    source = part.get(kind)
    url = source
    if isinstance(source, Mapping):
        names = ("file_data", "file_url") if kind == "file" else ("url",)
        url = next(filter(None, map(source.get, names)), None)
    file_id = member(source, "file_id")
    text = url if isinstance(url, str) else ""
    link = Link(message_index, position, text, part.get("uuid"), kind, file_id)
    if file_id is not None and (url or not isinstance(file_id, str)):
        message = f"file_id must be a string and stand alone, without the {_KINDS[kind]}'s data or URL"
        raise RequestError(message, param=link.param)
    if link.uuid is not None:
        _check_uuid(link.uuid, link.param.removesuffix(kind) + "uuid")
    return link


def _check_uuid(uuid: Any, param: str) -> None:
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_CHARS:
        raise RequestError(f"a uuid must be a string of 1 to {MAX_UUID_CHARS} characters", param=param)


def _check_count(kind: str, count: int, maximum: int | None) -> None:
    if maximum is not None and count > maximum:
        limit = f"at most {maximum} {kind}s per prompt are allowed (--limit-mm-per-prompt {kind}={maximum})"
        raise RequestError(f"{limit}, but {count} were given", param="messages")


class MediaResolver:
    """Replaces URLs, uuids and ids of files by bytes."""

    def __init__(
        self, fetcher: Fetcher, uuids: UuidCache, files: StoredFiles, policy: MediaPolicy, metrics: Metrics
    ) -> None:
        self._fetchers = {
            "image_url": fetcher,
            "video_url": fetcher.for_kind("video", "video/*", policy.video.max_bytes),
            "file": fetcher.for_kind("document", "application/pdf", policy.document.max_bytes),
        }
        self._uuids = uuids
        self._files = files
        self._policy = policy
        self._metrics = metrics

    async def fetch(self, links: Sequence[Link], on_bytes: OnBytes, client: str, tenant: str) -> Fetched:
        """The bytes of every file and URL, but data URLs. The first failure cancels the other fetches."""
        how = {"on_bytes": on_bytes, "client": client, "request": object()}
        tasks: dict[tuple[str, str], asyncio.Task[bytes]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for link in links:
                    if link.file_id is not None and (link.file_id, _STORED) not in tasks:
                        read = self._files.read(tenant, client, link.file_id, link.param, on_bytes)
                        tasks[link.file_id, _STORED] = group.create_task(read)
                    if link.is_remote and (link.url, link.kind) not in tasks:
                        tasks[link.url, link.kind] = group.create_task(self._fetch(link, how))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {key: task.result() for key, task in tasks.items()}

    async def _fetch(self, link: Link, how: Mapping[str, Any]) -> bytes:
        start = time.perf_counter()
        size = None
        try:
            data = await self._fetchers[link.kind].fetch(link.url, param=link.param, **how)
            size = len(data)
            return data
        finally:
            self._metrics.fetched(time.perf_counter() - start, size)

    def resolved(self, messages: Messages, links: Sequence[Link], fetched: Fetched, owner: bytes) -> Messages:
        """The messages with bytes in place of URLs. Runs in a thread: base64 with a uuid is decoded here."""
        resolved = list(messages)
        for link in links:
            data = self._bytes(link, fetched, owner)
            message = resolved[link.message]
            if data is None or not isinstance(message["content"], list):
                continue
            parts = list(message["content"])
            kind = self._kind(link, data)
            source = {**parts[link.part], "type": kind}
            parts[link.part] = {**source, kind: _with_bytes(source, kind, data)}
            resolved[link.message] = {**message, "content": parts}
        return resolved

    def remember(self, links: Sequence[Link], messages: Messages, owner: bytes) -> None:
        """Stores media with a uuid, after the prompt was built: only valid ones are stored."""
        for link in links:
            if link.uuid is None or not (link.url or link.file_id):
                continue
            part = messages[link.message]["content"][link.part]
            data = part[part["type"]].get("file_data" if part["type"] == "file" else "url")
            if isinstance(data, bytes):  # a list of frames stays a string
                self._uuids.put(owner, link.uuid, data)

    def _bytes(self, link: Link, fetched: Fetched, owner: bytes) -> bytes | None:
        """None leaves the part as it is: a data URL without a uuid, or something the processor refuses."""
        if link.file_id is not None:
            return fetched[link.file_id, _STORED]
        if link.is_remote:
            return fetched[link.url, link.kind]
        if link.uuid is None:
            return None
        if not link.url:
            return self._cached(link.uuid, link, owner)
        if link.is_video and "," in link.url.partition(",")[2]:
            return None
        policy = self._policy
        if link.kind == "file":
            return _named(link, lambda url: decode_document(url, policy))
        if link.is_video:
            policy = replace(policy, max_image_bytes=policy.video.max_bytes)
        return _named(link, lambda url: decode_data_url(url, policy))

    def _kind(self, link: Link, data: bytes) -> str:
        """The kind of part that the bytes stand in: a stored file may be an image."""
        if link.kind == "file" and link.file_id is not None and not is_pdf(data):
            return "image_url"
        return link.kind

    def _cached(self, uuid: str, link: Link, owner: bytes) -> bytes:
        data = self._uuids.get(owner, uuid)
        if data is None:
            kind = _KINDS[link.kind]
            message = f"no {kind} is kept under the uuid {quoted(uuid)}; send it again with its data"
            raise RequestError(message, code="image_file_not_found", param=link.param)
        return data


def _with_bytes(part: Mapping[str, Any], kind: str, data: bytes) -> dict[str, Any]:
    """What stands under a part's kind, with the bytes in place of the URL."""
    if kind == "file":
        return {"file_data": data}
    return {"url": data, "detail": member(part.get(kind), "detail")}


def _named(link: Link, decode: Callable[[str], bytes]) -> bytes:
    """Errors name the part."""
    try:
        return decode(link.url)
    except RequestError as error:
        raise RequestError(error.message, code=error.code, param=link.param) from None
