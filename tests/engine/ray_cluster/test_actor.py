"""What an engine's port on a cluster lets in, without a cluster."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray")  # an extra

from saccade.engine.ray_cluster import actor as actors

TOKEN = bytes(range(actors.TOKEN_BYTES))


def connect(listener: socket.socket, token: bytes) -> socket.socket:
    connection = socket.create_connection(listener.getsockname())
    connection.sendall(token)
    return connection


def test_only_a_connection_with_the_token_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_TOKEN_SECONDS", 0.2)
    actor = actors.WorkerActor(TOKEN, "tests.helpers.fake_worker")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        wrong = [connect(listener, token) for token in (TOKEN[::-1], TOKEN[:-1], b"")]
        right = connect(listener, TOKEN)
        accepted = pool.submit(actor._accept, listener).result(30)
        accepted.sendall(b"hello")
        assert right.recv(5) == b"hello"
        assert [connection.recv(1) for connection in wrong] == [b""] * 3  # closed
        for connection in (accepted, right, *wrong):
            connection.close()


def test_a_bridge_that_never_connects_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_CONNECT_SECONDS", 0.01)
    actor = actors.WorkerActor(TOKEN, "tests.helpers.fake_worker")
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        actor._accept(listener)
