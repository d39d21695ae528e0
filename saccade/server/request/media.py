"""Pictures and videos of a chat before its prompt is built: counted, fetched, or found by uuid. Decodes nothing.

messages ─► links (counted, refused early) ─► bytes (fetched or looked up) ─► messages the processor takes
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from saccade.errors import RequestError, quoted
from saccade.media.fetch import Fetcher, OnBytes
from saccade.media.load import decode_data_url
from saccade.options import MediaPolicy
from saccade.processor.images import reads_text_only
from saccade.server.metrics import Metrics
from saccade.server.request.media_uuids import MAX_UUID_CHARS, UuidCache

Messages = Sequence[Mapping[str, Any]]
Fetched = Mapping[tuple[str, bool], bytes]  # by URL, and whether as a video: the two have limits of their own

_CLAIM = re.compile(r"data:image/([a-z]{2,8})[;,]", re.IGNORECASE)


class Link(NamedTuple):
    """A picture or video part of a message, as the client wrote it."""

    message: int
    part: int
    url: str | None  # None: the client only names a uuid
    uuid: str | None
    kind: str = "image_url"  # or "video_url"

    @property
    def param(self) -> str:
        return f"messages[{self.message}].content[{self.part}].{self.kind}"

    @property
    def is_video(self) -> bool:
        return self.kind == "video_url"

    @property
    def is_data(self) -> bool:
        return self.url is not None and self.url[:5].lower() == "data:"

    @property
    def claimed_format(self) -> str | None:
        """What a data URL says its picture is. Only the bytes decide; this is for whoever wonders about a client."""
        match = _CLAIM.match(self.url or "")
        claimed = match[1].lower() if match else None
        return "jpeg" if claimed == "jpg" else claimed


class ChatLimits(NamedTuple):
    max_parts: int  # messages and parts together
    max_images: int | None  # None: the model takes none
    max_videos: int | None = None  # None: the processor says that the model takes none


def find_links(messages: Messages, limits: ChatLimits) -> list[Link]:
    """Pictures and videos of a chat; RequestError when there is too much. Odd shapes are left to the processor."""
    links: list[Link] = []
    num_parts = len(messages)
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else [content]
        num_parts += len(parts)
        _check_parts(num_parts, limits)
        for position, part in enumerate(parts):
            link = _link(part, index, position)
            links += [link] if link else []
    _check_images(sum(not link.is_video for link in links), limits)
    _check_videos(sum(link.is_video for link in links), limits)
    return links


def _link(part: Any, message: int, position: int) -> Link | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image_url", "video_url"):
        return None
    where = part.get(kind)
    url = where.get("url") if isinstance(where, Mapping) else where
    uuid = part.get("uuid")
    link = Link(message, position, url if isinstance(url, str) and url else None, uuid, kind)
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID_CHARS):
        raise RequestError(
            f"a uuid must be a string of 1 to {MAX_UUID_CHARS} characters",
            param=link.param.removesuffix(kind) + "uuid",
        )
    return link


def _check_parts(count: int, limits: ChatLimits) -> None:
    if count > limits.max_parts:
        raise RequestError(
            f"the request has more than {limits.max_parts} messages and parts, which is the limit (--max-parts)",
            param="messages",
        )


def _check_images(num_images: int, limits: ChatLimits) -> None:
    if num_images and limits.max_images is None:
        raise reads_text_only(num_images, "messages")
    if limits.max_images is not None and num_images > limits.max_images:
        raise RequestError(
            f"at most {limits.max_images} images per prompt are allowed (--limit-mm-per-prompt "
            f"image={limits.max_images}), but {num_images} were given",
            param="messages",
        )


def _check_videos(count: int, limits: ChatLimits) -> None:
    if limits.max_videos is not None and count > limits.max_videos:
        raise RequestError(
            f"at most {limits.max_videos} videos per prompt are allowed (--limit-mm-per-prompt "
            f"video={limits.max_videos}), but {count} were given",
            param="messages",
        )


class MediaResolver:
    """Puts bytes in the place of URLs and uuids."""

    def __init__(self, fetcher: Fetcher, uuids: UuidCache, policy: MediaPolicy, metrics: Metrics) -> None:
        self._fetcher = fetcher
        self._videos = fetcher.for_videos(policy.video.max_bytes)
        self._uuids = uuids
        self._policy = policy
        self._metrics = metrics

    async def fetch(self, links: Sequence[Link], on_bytes: OnBytes, client: str) -> Fetched:
        """What is behind each URL that is not a data URL. The first failure cancels the other fetches."""
        how = {"on_bytes": on_bytes, "client": client, "request": object()}
        wanted = {(link.url, link.is_video): link for link in links if link.url is not None and not link.is_data}
        tasks: dict[tuple[str, bool], asyncio.Task[bytes]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for (url, is_video), link in wanted.items():
                    tasks[url, is_video] = group.create_task(self._fetch(url, link, how))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {wanted: task.result() for wanted, task in tasks.items()}

    async def _fetch(self, url: str, link: Link, how: Mapping[str, Any]) -> bytes:
        start, size = time.perf_counter(), None
        try:
            fetcher = self._videos if link.is_video else self._fetcher
            data = await fetcher.fetch(url, param=link.param, **how)
            size = len(data)
            return data
        finally:
            self._metrics.fetched(time.perf_counter() - start, size)

    def resolved(self, messages: Messages, links: Sequence[Link], fetched: Fetched, owner: bytes) -> Messages:
        """The messages with bytes where they are at hand. Runs in a thread: data URLs with a uuid are decoded here."""
        found = {(link.message, link.part): self._bytes(link, fetched, owner) for link in links}
        return [_with_bytes(message, index, found) for index, message in enumerate(messages)]

    def remember(self, links: Sequence[Link], messages: Messages, owner: bytes) -> None:
        """Keep named pictures once a prompt was built from them, so that only good ones are kept."""
        for link in links:
            if link.uuid is not None and link.url is not None:
                data = messages[link.message]["content"][link.part][link.kind]["url"]
                if isinstance(data, bytes):  # frames one by one stay a string
                    self._uuids.put(owner, link.uuid, data)

    def _bytes(self, link: Link, fetched: Fetched, owner: bytes) -> bytes | None:
        """None leaves the part as it is: a data URL without a name, or something the processor refuses."""
        if link.url is None:
            return self._looked_up(link, owner) if link.uuid is not None else None
        if not link.is_data:
            return fetched[link.url, link.is_video]
        if link.uuid is None or (link.is_video and "," in link.url.partition(",")[2]):
            return None
        policy = self._policy
        if link.is_video:
            policy = replace(policy, max_image_bytes=policy.video.max_bytes)
        try:
            return decode_data_url(link.url, policy)
        except RequestError as error:
            raise RequestError(error.message, code=error.code, param=link.param) from None

    def _looked_up(self, link: Link, owner: bytes) -> bytes:
        assert link.uuid is not None
        data = self._uuids.get(owner, link.uuid)
        if data is None:
            kind = "video" if link.is_video else "picture"
            raise RequestError(
                f"no {kind} is kept under the uuid {quoted(link.uuid)}; send it again with its data",
                code="image_file_not_found",
                param=link.param,
            )
        return data


def _with_bytes(
    message: Mapping[str, Any], index: int, found: Mapping[tuple[int, int], bytes | None]
) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = [_part_with(part, found.get((index, position))) for position, part in enumerate(content)]
    return {**message, "content": parts}


def _part_with(part: Any, data: bytes | None) -> Any:
    if data is None:
        return part
    kind = part["type"]
    where = part.get(kind)
    detail = where.get("detail") if isinstance(where, Mapping) else None
    return {**part, kind: {"url": data, "detail": detail}}
