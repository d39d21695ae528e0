"""What the client of `saccade bench` reads out of a stream."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from saccade.apps.bench.stream_client import RequestSample, ServerAddress, StreamConnections
from saccade.errors import ConfigError
from tests.helpers.fakes.fake_chat_server import FakeChatServer, fake_chat_server

PATH = "/v1/chat/completions"


def send(fake: FakeChatServer, count: int = 1, tokens: int = 5, timeout: float = 30.0) -> list[RequestSample]:
    async def run() -> list[RequestSample]:
        connections = StreamConnections(ServerAddress(fake.url, "secret"), timeout)
        found = [await connections.send(PATH, json.dumps({"max_tokens": tokens}).encode()) for _ in range(count)]
        connections.close()
        return found

    return asyncio.run(run())


def test_every_token_has_a_time_and_the_usage_counts() -> None:
    with fake_chat_server(first_s=0.05, gap_s=0.02) as fake:
        (sample,) = send(fake)
    assert sample.error is None
    assert len(sample.token_times) == sample.output_tokens == 5 and sample.prompt_tokens == 7
    assert sample.token_times[0] - sample.start >= 0.05, "the role alone is no token"
    assert all(b - a > 0.005 for a, b in zip(sample.token_times, sample.token_times[1:], strict=False))
    assert sample.end >= sample.token_times[-1]
    assert fake.keys == ["Bearer secret"]


def test_a_connection_is_used_again() -> None:
    with fake_chat_server() as fake:
        assert [sample.error for sample in send(fake, count=3)] == [None] * 3
    assert fake.num_connections == 1 and len(fake.bodies) == 3


def test_a_refusal_is_an_error_with_its_text() -> None:
    with fake_chat_server(status=413) as fake:
        (sample,) = send(fake)
    assert sample.error == "413: too large" and not sample.token_times


def test_an_error_within_a_stream_is_one() -> None:
    with fake_chat_server(fails_midway=True) as fake:
        (sample,) = send(fake)
    assert sample.error is not None and "the engine died" in sample.error


def test_a_server_that_hangs_up_is_an_error_and_the_next_request_connects_again() -> None:
    with fake_chat_server(hangs_up=True) as fake:
        first, second = send(fake, count=2)
    assert first.error and second.error
    assert fake.num_connections == 2


def test_a_request_has_a_limit_of_time() -> None:
    with fake_chat_server(first_s=30.0) as fake:
        (sample,) = send(fake, timeout=0.1)
    assert sample.error == "no answer within 0.1 s"


def test_without_a_server_there_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        fake = FakeChatServer(url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        (sample,) = send(fake)
    assert sample.error is not None and sample.error.startswith("no connection to 127.0.0.1:")


@pytest.mark.parametrize("url", ["ftp://host", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="address of the server"):
        ServerAddress(url, None)


@pytest.mark.parametrize("url", ["http://host:80/prefix/v1/", "host:80/prefix"])
def test_paths_before_v1_are_kept(url: str) -> None:
    assert ServerAddress(url, None).post(PATH, b"").startswith(b"POST /prefix/v1/chat/completions HTTP/1.1\r\n")
