"""Streams against a fake engine: keep-alives, failures half-way, clients that leave. No process, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.engine.ipc.client import EngineUnavailable
from saccade.engine.ipc.stream import Submission
from saccade.errors import RequestError
from saccade.server import generation as generate
from saccade.server.errors import ApiError, ClientGone, api_error
from saccade.server.http.response import while_connected
from tests.helpers.fakes.fake_stream import Wire, new_stream, running, started, token


def test_silence_gives_keep_alives_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "KEEP_ALIVE_SECONDS", 0.01)

    async def check() -> None:
        stream = new_stream()
        deltas = (await started(stream)).deltas()
        assert await anext(deltas) is None
        stream.push(token(1))
        seen = [piece async for piece in _until(deltas, lambda piece: piece is not None)]
        assert seen[-1] is not None and seen[-1].text == "1"

    running(check)


async def _until(deltas: Any, is_last: Callable[[Any], bool]) -> Any:
    async for piece in deltas:
        yield piece
        if is_last(piece):
            return


def test_an_error_of_the_request_comes_out_of_its_pieces() -> None:
    async def check() -> None:
        stream = new_stream()
        stream.push(token(1))
        stream.push(token(0, "error", RequestError("bad", code="image_parse_error")))
        with pytest.raises(RequestError, match="bad"):
            async for _ in (await started(stream)).deltas():
                pass

    running(check)


def test_leaving_the_generation_cancels_its_requests() -> None:
    async def check() -> None:
        stream = new_stream()
        with await started(stream):
            assert not stream.is_cancelled
        assert stream.is_cancelled

    running(check)


def test_an_engine_that_gives_up_a_request_is_unavailable() -> None:
    async def check() -> None:
        stream = new_stream()
        stream.push(token(0, "abort"))
        with pytest.raises(EngineUnavailable):
            async for _ in (await started(stream)).deltas():
                pass

    running(check)


def test_an_error_before_the_first_byte_has_its_status() -> None:
    async def check() -> None:
        wire = Wire()
        await wire.writer().error(ApiError(429, "later", retry_after=2))
        assert wire.sent[0]["status"] == 429 and (b"retry-after", b"2") in wire.sent[0]["headers"]

    running(check)


def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def check() -> None:
        wire = Wire()
        writer = wire.writer()
        await writer.keep_alive()
        await writer.event({"a": 1})
        await writer.error(api_error(EngineUnavailable("gone", 1.0)))
        assert wire.sent[0]["status"] == 200 and wire.sent[-1]["more_body"] is False
        assert wire.body().startswith(b': keep-alive\n\ndata: {"a":1}\n\ndata: {"error":')
        assert b"[DONE]" not in wire.body()

    running(check)


def test_work_is_cancelled_when_the_client_leaves() -> None:
    async def check() -> None:
        wire = Wire()
        asyncio.get_running_loop().call_later(0.01, wire.gone.set)
        with pytest.raises(ClientGone):
            async with while_connected(wire.receive):
                await asyncio.Event().wait()

    running(check)


def test_work_that_somebody_else_cancels_stays_cancelled() -> None:
    async def check() -> None:
        async def work() -> None:
            async with while_connected(Wire().receive):
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    running(check)


def test_our_own_mistakes_say_nothing_about_themselves() -> None:
    error = api_error(ZeroDivisionError("secret detail"))
    assert error.status == 500 and "secret" not in error.message


def test_deltas_of_several_outputs_come_as_their_events_do() -> None:
    """One reader waits for all streams of a submission; each is read to its end."""

    async def check() -> None:
        submission = Submission([SimpleNamespace(request_id=name) for name in "ab"])  # type: ignore[misc]
        generation = await started(*submission.streams.values())
        first, second = submission.streams.values()
        deltas = generation.deltas()
        second.push(token(1))
        assert (await anext(deltas)).index == 1
        waiting = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        first.push(token(2, "stop"))
        assert (await waiting).index == 0
        second.push(token(3, "stop"))
        assert [delta.text async for delta in deltas] == ["3"]

    running(check)
