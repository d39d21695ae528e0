"""Fetching against a server on this machine that answers whatever a test wants, and a canary that must hear nothing."""

from __future__ import annotations

import asyncio
import gzip
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.media.fetch import Fetcher, FetchPolicy, Resolve
from tests.helpers.servers.fetching import (
    BODY,
    HOST,
    TRUST,
    Handler,
    Site,
    answer,
    certificate,
    resolving,
    response,
    running,
)


def made(policy: FetchPolicy, resolve: Resolve | None = None) -> Fetcher:
    return Fetcher(policy, resolve=resolve, ssl_context=TRUST)


def get(handler: Handler, path: str = "/a.png", **policy: Any) -> tuple[bytes, Site]:
    """Fetch from a local server under the name HOST."""

    async def scenario() -> tuple[bytes, Site]:
        async with running(handler) as site:
            allowed = {"allowed_domains": (f"{HOST}:{site.port}",), "allow_private_addresses": True, "timeout_s": 5}
            fetcher = made(FetchPolicy(**{**allowed, **policy}), resolving("127.0.0.1")[0])
            try:
                return await fetcher.fetch(f"http://{HOST}:{site.port}{path}", param="here"), site
            finally:
                await fetcher.close()

    return asyncio.run(scenario())


def failure(handler: Handler, **policy: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        get(handler, **policy)
    assert caught.value.param == "here"
    assert not re.search(r"127\.0\.0\.1|httpcore|Errno", caught.value.message)
    return caught.value


# --- what works ---------------------------------------------------------------------------------------------------


def test_a_image_from_an_allowed_host_arrives_whole() -> None:
    data, site = get(answer(response()))
    assert data == BODY
    head = site.requests[0].decode()
    assert head.startswith("GET /a.png HTTP/1.1\r\n")
    assert f"Host: {HOST}:{site.port}\r\n" in head
    assert re.search(r"User-Agent: saccade/\d", head) and "Accept: image/*\r\n" in head
    assert "cookie" not in head.lower()


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert get(answer(response(content_length="")))[0] == BODY


def test_a_compressed_body_is_unpacked() -> None:
    packed = gzip.compress(BODY)
    assert get(answer(response(packed, content_encoding="gzip")))[0] == BODY


def test_a_redirect_on_an_allowed_host_is_followed() -> None:
    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        is_first = request.startswith(b"GET /a.png")
        writer.write(response(b"", "302 Found", location="/b%20c.png?x=1") if is_first else response())

    data, site = get(handle)
    assert data == BODY
    assert site.requests[1].startswith(b"GET /b%20c.png?x=1 ")


def test_a_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert get(answer(response()))[0] == BODY


@pytest.mark.parametrize(("name", "is_fine"), [(HOST, True), ("other.test", False)])
def test_a_certificate_is_checked_against_the_name_in_the_url(tmp_path: Path, name: str, is_fine: bool) -> None:
    async def scenario() -> bytes:
        trusting = ssl.create_default_context(cafile=str(certificate_file))
        async with running(answer(response()), tls=server_side) as site:
            policy = FetchPolicy(allowed_domains=(f"{HOST}:{site.port}",), allow_private_addresses=True, timeout_s=5)
            fetcher = Fetcher(policy, resolve=resolving("127.0.0.1")[0], ssl_context=trusting)
            return await fetcher.fetch(f"https://{HOST}:{site.port}/a.png")

    server_side, certificate_file = certificate(tmp_path, name), tmp_path / "cert.pem"
    if is_fine:
        assert asyncio.run(scenario()) == BODY
    else:
        with pytest.raises(RequestError) as caught:
            asyncio.run(scenario())
        assert caught.value.code == "failed_to_download_image"


# --- servers that misbehave ---------------------------------------------------------------------------------------


async def _drip(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    for _i in range(1000):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _drip_headers(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for i in range(1000):
        writer.write(f"x-{i}: y\r\n".encode())
        await writer.drain()
        await asyncio.sleep(0.02)


async def _endless(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def _silent(_: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(2)


BOMB = gzip.compress(b"\0" * (8 << 20))
MISBEHAVING: dict[str, tuple[Handler, str]] = {
    "404": (answer(response(b"no", "404 Not Found")), "status 404"),
    "403": (answer(response(b"no", "403 Forbidden")), "status 403"),
    "500": (answer(response(b"no", "500 Oops")), "status 500"),
    "206": (answer(response(b"no", "206 Partial Content")), "status 206"),
    "silence": (_silent, "within 0.5 s"),
    "a slow drip of bytes": (_drip, "within 0.5 s"),
    "a slow drip of headers": (_drip_headers, "within 0.5 s"),
    "an endless stream": (_endless, "more than 100000 bytes"),
    "a length over the limit": (answer(response(content_length="200000")), "more than 100000 bytes"),
    "a length larger than the body": (answer(response(content_length="5000")), "broke off"),
    "a gzip bomb": (answer(response(BOMB, content_encoding="gzip")), "more than 100000 bytes"),
    "a gzip bomb as transfer encoding": (
        answer(response(BOMB, content_length="", transfer_encoding="gzip, chunked")),
        "broke off",
    ),
    "broken gzip": (answer(response(b"no gzip", content_encoding="gzip")), "compression"),
    "an unknown compression": (answer(response(content_encoding="br")), "compression"),
    "no HTTP at all": (answer(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "broke off"),
    "a closed connection": (answer(b""), "broke off"),
    "redirects without end": (answer(response(b"", "302 Found", location="/again")), "more than 3 redirects"),
    "a redirect to no URL": (answer(response(b"", "302 Found", location="http://[1")), "no URL"),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_a_server_that_answers_badly_fails_one_download(name: str) -> None:
    handler, part = MISBEHAVING[name]
    error = failure(handler, timeout_s=0.5, max_bytes=100_000)
    assert error.code == "failed_to_download_image"
    assert part in error.message


def test_a_server_that_is_not_there_fails_one_download() -> None:
    async def scenario() -> None:
        async with running(answer(b"")) as site:
            port = site.port
        policy = FetchPolicy(allowed_domains=(f"{HOST}:{port}",), allow_private_addresses=True)
        await made(policy, resolving("127.0.0.1")[0]).fetch(f"http://{HOST}:{port}/")

    with pytest.raises(RequestError, match="failed or broke off") as caught:
        asyncio.run(scenario())
    assert caught.value.code == "failed_to_download_image"


def test_a_name_that_cannot_be_resolved_fails_one_download() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    with pytest.raises(RequestError, match="unknown") as caught:
        asyncio.run(made(FetchPolicy(allowed_domains=("*",)), resolve).fetch("http://nowhere.example/"))
    assert caught.value.code == "failed_to_download_image"


def test_a_resolver_that_hangs_ends_with_the_connect_deadline() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    policy = FetchPolicy(allowed_domains=("*",), connect_timeout_s=0.1)
    with pytest.raises(RequestError, match=r"within 0\.1 s"):
        asyncio.run(made(policy, resolve).fetch("http://slow.example/"))


def test_a_cancelled_fetch_leaves_no_task_behind() -> None:
    async def scenario() -> int:
        async with running(_silent) as site:
            policy = FetchPolicy(allowed_domains=(f"{HOST}:{site.port}",), allow_private_addresses=True)
            fetcher = made(policy, resolving("127.0.0.1")[0])
            task = asyncio.create_task(fetcher.fetch(f"http://{HOST}:{site.port}/"))
            while not site.requests:
                await asyncio.sleep(0.01)
            before = len(asyncio.all_tasks())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await fetcher.close()
            return before - len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1


# --- what must not be connected to --------------------------------------------------------------------------------

FORBIDDEN = [
    "http://127.0.0.1:{port}/",
    "http://[::1]:{port}/",
    "http://169.254.169.254:{port}/latest/meta-data/",
    "http://10.0.0.1:{port}/",
    "http://[fd00::1]:{port}/",
    "http://100.64.0.1:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0x7f.1:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://0:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[64:ff9b::7f00:1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://[::127.0.0.1]:{port}/",
    "http://[::1%25lo]:{port}/",
    "http://localhost:{port}/",
    "http://allowed.example\\@127.0.0.1:{port}/",
    "http://user@127.0.0.1:{port}/",
    "http://allowed.example@127.0.0.1:{port}/",
    "http://user:password@allowed.example:{port}/",
    "http://127.0.0.1:{port}#@allowed.example/",
    "http://127。0。0。1:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/",
    "http://ｌｏｃａｌｈｏｓｔ:{port}/",
    "http://allowed.example:{port} /",
    "http://allowed.example\t:{port}/",
    "http://allowed.example\r\nHost: x:{port}/",
    " http://127.0.0.1:{port}/",
    "http:/127.0.0.1:{port}/",
    "http:127.0.0.1:{port}/",
    "http:///127.0.0.1:{port}/",
    "http://:{port}/",
    "http://allowed.example:99999/",
    "ftp://127.0.0.1:{port}/a.png",
    "gopher://127.0.0.1:{port}/_x",
    "unix:///var/run/docker.sock",
    "file:///etc/passwd",
    "/etc/passwd",
    "//127.0.0.1:{port}/",
    "127.0.0.1:{port}",
    "",
]


@pytest.mark.parametrize("domains", [("*",), ("*:{port}",), ("allowed.example:{port}",)], ids=str)
@pytest.mark.parametrize("url", FORBIDDEN)
def test_a_forbidden_url_is_refused_and_nobody_is_connected_to(url: str, domains: tuple[str, ...]) -> None:
    async def scenario() -> list[bytes]:
        async with running(answer(response())) as canary:
            allowed = tuple(domain.format(port=canary.port) for domain in domains)
            fetcher = made(FetchPolicy(allowed_domains=allowed, timeout_s=2), resolving("127.0.0.1")[0])
            with pytest.raises(RequestError) as caught:
                await fetcher.fetch(url.format(port=canary.port), param="here")
            assert (caught.value.code, caught.value.param) == ("invalid_image_url", "here")
            return canary.requests

    assert asyncio.run(scenario()) == []


def test_a_name_with_one_private_address_among_public_ones_is_refused() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "127.0.0.1"]

    with pytest.raises(RequestError, match="not on the public internet") as caught:
        asyncio.run(made(FetchPolicy(allowed_domains=("*",)), resolve).fetch("http://two.example/"))
    assert caught.value.code == "invalid_image_url"


def test_a_name_is_resolved_once_so_a_second_answer_cannot_rebind_it() -> None:
    async def scenario() -> tuple[list[str], list[bytes]]:
        async with running(answer(response())) as canary:
            resolve, asked = resolving("93.184.216.34", "127.0.0.1")
            policy = FetchPolicy(allowed_domains=(f"rebind.example:{canary.port}",), connect_timeout_s=0.2)
            with pytest.raises(RequestError):
                await made(policy, resolve).fetch(f"http://rebind.example:{canary.port}/")
            return asked, canary.requests

    assert asyncio.run(scenario()) == (["rebind.example"], [])


@pytest.mark.parametrize("location", ["http://127.0.0.1:{port}/", "http://other.test:{port}/", "file:///etc/passwd"])
def test_each_redirect_is_checked_like_the_first_url(location: str) -> None:
    async def scenario() -> tuple[str | None, int]:
        async with running(answer(response())) as canary:
            target = location.format(port=canary.port)
            async with running(answer(response(b"", "302 Found", location=target))) as site:
                policy = FetchPolicy(allowed_domains=(f"{HOST}:{site.port}",), allow_private_addresses=True)
                fetcher = made(policy, resolving("127.0.0.1")[0])
                with pytest.raises(RequestError) as caught:
                    await fetcher.fetch(f"http://{HOST}:{site.port}/")
            return caught.value.code, len(canary.requests)

    assert asyncio.run(scenario()) == ("invalid_image_url", 0)


def test_a_name_that_leads_to_a_private_address_is_refused() -> None:
    with pytest.raises(RequestError, match="public internet"):
        asyncio.run(made(FetchPolicy(allowed_domains=("*",)), resolving("192.168.0.1")[0]).fetch("http://a.example/"))


def test_nothing_is_fetched_unless_domains_are_allowed() -> None:
    with pytest.raises(RequestError, match="--allowed-media-domains") as caught:
        asyncio.run(made(FetchPolicy()).fetch("https://example.com/a.png", param="here"))
    assert (caught.value.code, caught.value.param) == ("invalid_image_url", "here")
