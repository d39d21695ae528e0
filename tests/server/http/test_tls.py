"""HTTPS at the listener: certificates, clients' certificates, handshakes that never end, and files that are wrong."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from saccade.errors import ConfigError, UsageError
from saccade.options.server import ServerOptions
from saccade.server.http.connections import OpenConnections
from saccade.server.http.listener import Listener
from saccade.server.http.parser import BoundedHttp
from saccade.server.http.tls import Certificate, tls_context


def make_certificate(folder: Path, name: str, *more: str) -> dict[str, str]:
    """Self-signed, so that it is its own authority."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", key, "-out", cert]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    passphrase = more or ("-nodes",)
    subprocess.run(
        ["openssl", "req", "-x509", "-days", "2", *kind, *subject, *passphrase], check=True, capture_output=True
    )
    return {"ssl_certfile": cert, "ssl_keyfile": key}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "server")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = f"{scope['scheme']} {scope['path']}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serving(options: ServerOptions, test: Callable[[int, OpenConnections], Awaitable[None]], maximum: int = 8) -> None:
    """Runs `test` beside a listener, with its port."""

    async def run() -> None:
        config = uvicorn.Config(echo, ws="none", lifespan="off", log_config=None)
        config.load()
        connections = OpenConnections(maximum, 1.0, on_refusal=lambda reason: None)
        state = ServerState()
        sock = socket.create_server(("127.0.0.1", 0))
        listener = Listener(
            sock,
            lambda handshake: BoundedHttp(config, state, options, connections, handshake),
            connections,
            tls_context(options),
            options.header_timeout,
        )
        listener.open()
        try:
            async with asyncio.timeout(30):
                await test(sock.getsockname()[1], connections)
        finally:
            listener.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server has it
        runner.run(run())


def trusting(files: dict[str, str], client: dict[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files["ssl_certfile"])
    if client is not None:
        context.load_cert_chain(client["ssl_certfile"], client["ssl_keyfile"])
    return context


async def get(port: int, context: ssl.SSLContext, path: str = "/live") -> httpx.Response:
    async with httpx.AsyncClient(verify=context) as client:
        return await client.get(f"https://127.0.0.1:{port}{path}")


def test_requests_are_answered_over_tls(files: dict[str, str]) -> None:
    async def test(port: int, connections: OpenConnections) -> None:
        async with httpx.AsyncClient(verify=trusting(files)) as client:
            for _ in range(2):  # the second on the same connection
                response = await client.get(f"https://127.0.0.1:{port}/live")
                assert (response.status_code, response.text) == (200, "https /live")

    serving(ServerOptions(**files), test)


def test_bad_http_over_tls_is_answered_and_the_connection_closed(files: dict[str, str]) -> None:
    async def test(port: int, connections: OpenConnections) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(files))
        writer.write(b"nonsense\r\n\r\n")
        assert b"invalid_http" in await reader.read()  # to the end
        writer.close()

    serving(ServerOptions(**files), test)


def test_a_client_without_a_certificate_is_refused_where_all_need_one(files: dict[str, str], tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "client")

    async def test(port: int, connections: OpenConnections) -> None:
        assert (await get(port, trusting(files, own))).status_code == 200
        with pytest.raises(httpx.TransportError):
            await get(port, trusting(files))

    serving(ServerOptions(**files, ssl_ca_certs=own["ssl_certfile"]), test)


def test_handshakes_that_never_end_count_as_connections_and_make_room(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.server.http.connections._MIN_IDLE_SECONDS", -1.0)

    async def test(port: int, connections: OpenConnections) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while connections.num_open != 2:
            await asyncio.sleep(0.01)
        assert (await get(port, trusting(files))).status_code == 200
        assert await silent[0][0].read() == b""  # the oldest had to go
        for _, writer in silent:
            writer.close()

    serving(ServerOptions(**files), test, maximum=2)


def test_a_handshake_that_takes_too_long_ends(files: dict[str, str]) -> None:
    async def test(port: int, connections: OpenConnections) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()

    serving(ServerOptions(**files, header_timeout=0.2), test)


def test_a_new_certificate_serves_new_connections(files: dict[str, str], tmp_path: Path) -> None:
    options = ServerOptions(**files)
    context = tls_context(options)
    assert context is not None
    other = make_certificate(tmp_path, "renewed")
    Certificate(ServerOptions(**other)).load_into(context)
    server, client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = context.wrap_bio(client, server, server_side=True)
    theirs = trusting(other).wrap_bio(server, client, server_hostname="127.0.0.1")
    for _ in range(4):
        for side in (theirs, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert theirs.getpeercert()["subject"] == ((("commonName", "renewed"),),)


def test_without_files_in_memory_private_ones_are_used_and_removed(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")  # macOS
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context = tls_context(ServerOptions(**files, ssl_ca_certs=files["ssl_certfile"]))
    assert context is not None and context.cert_store_stats()["x509"] == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["missing", "no PEM", "another's key", "passphrase", "authorities"])
def test_files_that_cannot_be_used_are_named(files: dict[str, str], tmp_path: Path, wrong: str) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    given: dict[str, dict[str, str]] = {
        "missing": {"ssl_certfile": str(tmp_path / "none.pem")},
        "no PEM": {"ssl_certfile": str(junk)},
        "another's key": {**files, "ssl_keyfile": make_certificate(tmp_path, "other")["ssl_keyfile"]},
        "passphrase": make_certificate(tmp_path, "locked", "-passout", "pass:secret"),
        "authorities": {**files, "ssl_ca_certs": str(junk)},
    }
    named = "ssl_ca_certs" if wrong == "authorities" else "ssl_keyfile"
    with pytest.raises(ConfigError, match=named):
        tls_context(ServerOptions(**given[wrong]))


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_ca_certs"])
def test_a_key_without_a_certificate_is_a_mistake(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=x.pem needs ssl_certfile"):
        ServerOptions(**{name: "x.pem"})
