"""A running server whose clients name slow, endless and large URLs: others fetch meanwhile, and bytes are counted."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from saccade.media.connection_limits import SlotLimits
from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.fetching import (
    ENDLESS,
    HANG_GUARD,
    Handler,
    Site,
    answer,
    response,
    running,
    silent,
)
from tests.helpers.servers.hostile import watching
from tests.helpers.servers.serving import RunningServer, error_of, image_part, running_server, until

TIMEOUT = 5.0  # in which a busy machine reads the bytes that are too many
INFLIGHT_MB, LARGE = 16, 8 << 20
PHOTO = png(make_photo(112, 84))


@contextmanager
def origin(handler: Handler) -> Iterator[Site]:
    """An origin in a thread of its own."""
    loop, site, is_over = asyncio.new_event_loop(), Site(handler), asyncio.Event()
    is_up = threading.Event()

    async def serve() -> None:
        async with running(site.handler) as inner:
            site.port, site.requests = inner.port, inner.requests
            is_up.set()
            await is_over.wait()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert is_up.wait(HANG_GUARD)
    try:
        yield site
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()


ON_SITE: dict[str, Handler] = {
    "/photo": answer(response(PHOTO)),
    "/slow": silent,
    "/interim": ENDLESS["interim answers"],
    "/tiny": ENDLESS["chunks of one byte"],
    "/large": answer(response(bytes(LARGE))),
    "/packed": answer(response(gzip.compress(bytes(LARGE)), content_encoding="gzip")),
}


async def _on_site(request: bytes, writer: asyncio.StreamWriter) -> None:
    await ON_SITE[request.split(b" ")[1].decode().partition("?")[0]](request, writer)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with origin(_on_site) as site:
        yield site


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number in range(16):
        (folder / f"{number}.png").write_bytes(bytes(LARGE))
    return folder


@pytest.fixture(scope="module")
def server(qwen2_vl_folder: Path, site: Site, files: Path) -> Iterator[RunningServer]:
    flags = {
        "--allowed-media-domains": f"127.0.0.1:{site.port}",
        "--media-fetch-timeout": str(TIMEOUT),
        "--limit-mm-per-prompt": "image=16",
        "--max-inflight-mb": str(INFLIGHT_MB),
        "--max-body-mb": str(INFLIGHT_MB),
        "--allowed-local-media-path": str(files),
    }
    given = [word for pair in flags.items() for word in pair]
    with running_server(qwen2_vl_folder, *given, "--allow-private-media-addresses") as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        server, site = request.getfixturevalue("server"), request.getfixturevalue("site")
        assert until(lambda: not connections(server, site))
        assert until(lambda: server.stats("saccade:request_bytes") == 0)


def connections(server: RunningServer, site: Site) -> int:
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(bool(connection.raddr) and connection.raddr.port == site.port for connection in found)


def ask(server: RunningServer, *urls: str) -> httpx.Response:
    return server.chat([image_part(url) for url in urls])


def urls(site: Site, path: str, count: int = 16) -> list[str]:
    return [f"http://127.0.0.1:{site.port}{path}?{number}" for number in range(count)]


def test_fetching_goes_on_after_many_requests_of_slow_urls(server: RunningServer, site: Site) -> None:
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: ask(server, *urls(site, "/slow")), range(24)))
    assert {response.status_code for response in answers} <= {400, 429}
    assert until(lambda: not connections(server, site))
    good = ask(server, *urls(site, "/photo", 2))
    assert good.status_code == 200, good.text


def test_one_request_of_slow_urls_does_not_keep_another_from_fetching(server: RunningServer, site: Site) -> None:
    with ThreadPoolExecutor(2) as pool:
        before = len(site.requests)
        slow = pool.submit(ask, server, *urls(site, "/slow"))
        assert until(lambda: len(site.requests) > before)
        good = ask(server, *urls(site, "/photo", 1))
        assert good.status_code == 200 and len(site.requests) <= before + 1 + SlotLimits().request
        assert slow.result().status_code == 400


@pytest.mark.parametrize("path", ["/interim", "/tiny"])
def test_an_origin_that_never_comes_to_its_point_keeps_nobody_waiting(
    server: RunningServer, site: Site, path: str
) -> None:
    with watching(server) as watch, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(server, *urls(site, path)), range(12)))
    messages = [error_of(response)["message"] for response in answers]
    assert all("broke off" in message for message in messages), messages
    assert watch.num_answered and not watch.failures


@pytest.mark.parametrize("kind", ["/large", "/packed", "file"])
def test_fetched_bytes_count_while_they_arrive(server: RunningServer, site: Site, files: Path, kind: str) -> None:
    """Sixteen of 8 MB each are never in memory together where 16 MB may be in flight."""
    wanted = [f"file://{files}/{number}.png" for number in range(16)] if kind == "file" else urls(site, kind)
    with watching(server) as watch, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(server, *wanted), range(4)))
    assert all(response.status_code >= 400 for response in answers)
    assert "overloaded" in {error_of(response)["code"] for response in answers}, "the share of one client, or of all"
    assert watch.api_growth_mb < 4 * INFLIGHT_MB, "256 MB were asked for"
    assert not watch.failures
