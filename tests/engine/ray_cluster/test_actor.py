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


def test_only_a_connection_with_the_token_is_taken() -> None:
    actor = actors.WorkerActor(TOKEN, "tests.helpers.fakes.fake_worker")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        wrong = [connect(listener, token) for token in (TOKEN[::-1], TOKEN[:-1], b"")]
        right = connect(listener, TOKEN)
        accepted = pool.submit(actor._accept, listener).result(30)
        accepted.sendall(b"hello")
        assert right.recv(5) == b"hello"
        assert [connection.recv(1) for connection in wrong] == [b""] * 3  # closed
        for connection in (accepted, right, *wrong):
            connection.close()


def test_silent_connections_keep_nothing_waiting_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_MAX_WAITING", 5)
    actor = actors.WorkerActor(TOKEN, "tests.helpers.fakes.fake_worker")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        silent = [connect(listener, b"") for _ in range(20)]
        taking = pool.submit(actor._accept, listener)
        for connection in silent[:14]:
            connection.settimeout(30)
            assert connection.recv(1) == b""  # closed: one comes for each that goes
        silent[-1].settimeout(0)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        right = connect(listener, TOKEN)
        accepted = taking.result(30)
        for connection in (accepted, right, *silent):
            connection.close()


def test_connections_that_go_on_coming_do_not_prolong_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_CONNECT_SECONDS", 0.5)
    actor = actors.WorkerActor(TOKEN, "tests.helpers.fakes.fake_worker")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        taking = pool.submit(actor._accept, listener)
        while not taking.done():
            connect(listener, b"wrong").close()
        with pytest.raises(TimeoutError, match="did not connect within"):
            taking.result()


def test_a_bridge_that_never_connects_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_CONNECT_SECONDS", 0.01)
    actor = actors.WorkerActor(TOKEN, "tests.helpers.fakes.fake_worker")
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        actor._accept(listener)
