"""The largest number of images in one request that works: doubled until one is refused, then bisected."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from saccade.apps.bench.load import PATH, Server
from saccade.apps.bench.stream_client import RequestSample, ServerAddress, StreamConnections
from saccade.apps.bench.workloads import WORKLOADS, RequestShape


class Attempt(NamedTuple):
    """A request with so many images."""

    images: int
    error: str | None  # None: it was answered
    is_refusal: bool = False  # the server says no (4xx); any other error is a failure of the server


class MaxImages(NamedTuple):
    images: int  # that worked
    limit: Attempt | None  # the smallest number that did not; None where all that were tried did


def find_max_images(attempt: Callable[[int], Attempt], up_to: int) -> MaxImages:
    """A failure, other than a refusal, ends the search: a server that broke is not asked again."""
    low = 0
    high = 1
    limit: Attempt | None = None
    while limit is None and low < up_to:
        outcome = attempt(high)
        if outcome.error is not None:
            limit = outcome
        else:
            low = high
            high = min(2 * high, up_to)
    while limit is not None and limit.is_refusal and limit.images - low > 1:
        outcome = attempt((low + limit.images) // 2)
        if outcome.error is None:
            low = outcome.images
        else:
            limit = outcome
    return MaxImages(low, limit)


def send_images(server: Server, shape: RequestShape, images: int, seed: int) -> Attempt:
    """New images each time: those of the last attempt may be cached."""
    job = WORKLOADS["image"](replace(shape, images=images), 0, random.Random(f"{seed} {images}"))
    sample = asyncio.run(_send(server, job.bodies[0]))
    return Attempt(images, sample.error, 400 <= sample.status < 500)


async def _send(server: Server, body: bytes) -> RequestSample:
    connections = StreamConnections(ServerAddress(server.url, server.api_key), server.timeout)
    try:
        return await connections.send(PATH, body)
    finally:
        connections.close()
