"""Origins that are slow, endless or crafted, and clients that send many of their URLs: nobody else's fetches suffer."""

from __future__ import annotations

import asyncio
import gzip
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from saccade.errors import RequestError
from saccade.media.connection_limits import Owners, SlotLimits, Slots
from saccade.media.fetch import Fetcher, FetchPolicy
from tests.helpers.servers.fetching import (
    BODY,
    CHUNKED,
    ENDLESS,
    ENDLESS_BODY,
    HANG_GUARD,
    HOST,
    TRUST,
    Site,
    answer,
    certificate,
    resolving,
    response,
    running,
    silent,
)

CANCELLED_AFTER = range(40)  # turns of the loop: before, in and after every wait of a fetch
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def sockets_to(port: int) -> int:
    """This process's own ends of connections to an origin, which runs here too."""
    found = psutil.Process().net_connections("tcp")
    return sum(bool(connection.raddr) and connection.raddr.port == port for connection in found)


def run(scenario: Callable[[], Awaitable[Any]], loop: str = "asyncio") -> Any:
    async def guarded() -> Any:
        async with asyncio.timeout(HANG_GUARD):
            return await scenario()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(guarded())


@asynccontextmanager
async def fetching(*sites: Site, **policy: Any) -> AsyncIterator[Fetcher]:
    allowed = tuple(f"{HOST}:{site.port}" for site in sites)
    given = {"allowed_domains": allowed, "allow_private_addresses": True, **policy}
    fetcher = Fetcher(FetchPolicy(**given), resolve=resolving("127.0.0.1")[0], ssl_context=TRUST)
    try:
        yield fetcher
    finally:
        await fetcher.close()


def url_of(site: Site, path: str = "/a.png", scheme: str = "http") -> str:
    return f"{scheme}://{HOST}:{site.port}{path}"


async def nothing_left(fetcher: Fetcher, *sites: Site) -> None:
    while fetcher.slots.num_taken or any(sockets_to(site.port) for site in sites):
        await asyncio.sleep(0.01)


# --- no slot and no socket is lost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_fetches_that_time_out_together_give_every_slot_and_socket_back(loop: str) -> None:
    async def scenario() -> bytes:
        async with running(silent) as slow, running(answer(response())) as good:
            slots = SlotLimits(total=12, client=12, request=12, host=12)
            async with fetching(slow, good, timeout_s=0.05, slots=slots) as fetcher:
                for _ in range(20):
                    with pytest.raises(ExceptionGroup):
                        async with asyncio.TaskGroup() as group:
                            for number in range(16):
                                group.create_task(fetcher.fetch(url_of(slow, f"/{number}")))
                await nothing_left(fetcher, slow)
            async with fetching(slow, good, timeout_s=5, slots=slots) as fetcher:
                return await fetcher.fetch(url_of(good))

    assert run(scenario, loop) == BODY


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_fetch_may_be_cancelled_at_any_moment(loop: str, scheme: str) -> None:
    async def scenario() -> None:
        async with running(silent) as slow, fetching(slow, timeout_s=30) as fetcher:
            for turns in CANCELLED_AFTER:
                tasks = [asyncio.create_task(fetcher.fetch(url_of(slow, scheme=scheme))) for _ in range(4)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await nothing_left(fetcher, slow)

    run(scenario, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_fetch_may_be_cancelled_while_a_body_comes_over_tls(loop: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(ENDLESS_BODY, tls=server_side) as site:
            fetcher = Fetcher(
                FetchPolicy(allowed_domains=(f"{HOST}:{site.port}",), allow_private_addresses=True, timeout_s=30),
                resolve=resolving("127.0.0.1")[0],
                ssl_context=ssl.create_default_context(cafile=str(tmp_path / "cert.pem")),
            )
            for count in range(8):
                task = asyncio.create_task(fetcher.fetch(url_of(site, scheme="https")))
                while len(site.requests) <= count:
                    await asyncio.sleep(0.005)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await nothing_left(fetcher, site)

    server_side = certificate(tmp_path, HOST)
    run(scenario, loop)


def test_a_lookup_that_outlives_its_fetch_keeps_its_slot_until_it_ends() -> None:
    async def scenario() -> tuple[int, int]:
        answered = asyncio.Event()

        async def resolve(host: str, port: int) -> list[str]:
            await answered.wait()
            return ["127.0.0.1"]

        policy = FetchPolicy(allowed_domains=("*",), timeout_s=0.05)
        fetcher = Fetcher(policy, resolve=resolve, ssl_context=TRUST)
        with pytest.raises(RequestError, match="did not arrive"):
            await fetcher.fetch("http://slow.example/")
        held = fetcher.slots.num_taken
        answered.set()
        await nothing_left(fetcher)
        return held, fetcher.slots.num_taken

    assert run(scenario) == (1, 0)


def test_slots_are_never_lost_nor_given_twice_whatever_is_cancelled() -> None:
    limits = SlotLimits(total=5, client=3, request=2, host=4)
    dice = random.Random(0)

    async def scenario() -> None:
        slots, maximum = Slots(limits), 0

        async def work(owners: Owners, turns: int) -> None:
            nonlocal maximum
            async with slots.taken(owners):
                maximum = max(maximum, slots.num_taken)
                for _ in range(turns):
                    await asyncio.sleep(0)

        tasks = []
        for _ in range(500):
            owners = Owners(f"c{dice.randrange(3)}", dice.randrange(4), f"h{dice.randrange(2)}")
            tasks.append(asyncio.create_task(work(owners, dice.randrange(4))))
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            if dice.random() < 0.5:
                dice.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.num_taken == 0 and 0 < maximum <= limits.total
        assert all(task.done() for task in tasks)
        async with AsyncExitStack() as stack:  # all of them can be had again
            for name in map(str, range(limits.total)):
                await stack.enter_async_context(slots.taken(Owners(name, name, name)))

    run(scenario)


# --- nobody takes them all ------------------------------------------------------------------------------------------


def test_a_clients_slow_fetches_leave_room_for_another_client() -> None:
    async def scenario() -> bool:
        async with running(silent) as slow, running(answer(response())) as good:
            slots = SlotLimits(total=8, client=4, request=4, host=8)
            async with fetching(slow, good, timeout_s=30, slots=slots) as fetcher:
                held = [
                    asyncio.create_task(fetcher.fetch(url_of(slow), client="greedy", request=number))
                    for number in range(40)
                ]
                while len(slow.requests) < slots.client:
                    await asyncio.sleep(0.01)
                assert await fetcher.fetch(url_of(good), client="other", request="its") == BODY
                is_under_way = not any(task.done() for task in held) and len(slow.requests) == slots.client
                for task in held:
                    task.cancel()
                await asyncio.gather(*held, return_exceptions=True)
                await nothing_left(fetcher, slow, good)
                return is_under_way

    assert run(scenario)


def test_a_slow_host_leaves_room_for_another_host() -> None:
    async def scenario() -> int:
        slots = Slots(SlotLimits(total=4, client=4, request=4, host=2))

        async def hold(number: int) -> None:
            async with slots.taken(Owners("c", number, "slow.test")):
                await asyncio.Event().wait()

        held = [asyncio.create_task(hold(number)) for number in range(4)]
        await asyncio.sleep(0)
        async with slots.taken(Owners("c", "r", "good.test")):
            num_taken = slots.num_taken
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert slots.num_taken == 0
        return num_taken

    assert run(scenario) == 3


def test_of_one_request_only_a_few_urls_are_fetched_at_a_time() -> None:
    at_once, maximum = 0, 0

    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal at_once, maximum
        at_once += 1
        maximum = max(maximum, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        writer.write(response())

    async def scenario() -> list[bytes]:
        async with running(handle) as site, fetching(site, timeout_s=30) as fetcher:
            fetches = (fetcher.fetch(url_of(site, f"/{i}"), client="c", request="r") for i in range(16))
            return await asyncio.gather(*fetches)

    assert run(scenario) == [BODY] * 16
    assert maximum == SlotLimits().request


def test_a_fetch_that_only_waited_is_refused_as_overload_within_its_deadline() -> None:
    async def scenario() -> RequestError:
        slots = SlotLimits(total=1, client=1, request=1, host=1)
        async with running(answer(response())) as good, fetching(good, timeout_s=0.1, slots=slots) as fetcher:
            async with fetcher.slots.taken(Owners("other", None, "slow.test")):
                with pytest.raises(RequestError) as caught:
                    await fetcher.fetch(url_of(good), client="c", param="here")
            assert await fetcher.fetch(url_of(good)) == BODY
            return caught.value

    error = run(scenario)
    assert (error.code, error.param) == ("overloaded", "here")
    assert "0.1 s" in error.message


# --- answers that never come to their point -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDLESS)
def test_what_is_no_body_ends_after_some_bytes_not_with_the_deadline(name: str) -> None:
    async def scenario() -> str:
        async with running(ENDLESS[name]) as site, fetching(site, timeout_s=30, max_bytes=50 << 20) as fetcher:
            with pytest.raises(RequestError) as caught:
                await fetcher.fetch(url_of(site))
            await nothing_left(fetcher, site)
            assert caught.value.code == "failed_to_download_image"
            return caught.value.message

    assert "broke off" in run(scenario)


def test_interim_answers_chunks_extensions_and_trailers_in_measure_are_read() -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-length: 1\r\n\r\n" + CHUNKED
    chunks = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:]))

    async def scenario() -> bytes:
        whole = head + chunks + b"0\r\nx-more: yes\r\n\r\n" + response(b"another answer")
        pieces = (whole[i : i + 11] for i in range(0, len(whole), 11))
        async with running(answer(*pieces)) as site, fetching(site, timeout_s=30) as fetcher:
            return await fetcher.fetch(url_of(site))

    assert run(scenario) == BODY


def test_others_have_their_turn_while_a_bomb_is_unpacked_and_every_byte_is_counted() -> None:
    size, turns, told = 8 << 20, 0, list[int]()

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def scenario() -> bytes:
        bomb = response(gzip.compress(bytes(size)), content_encoding="gzip")
        async with running(answer(bomb)) as site, fetching(site, timeout_s=30) as fetcher:
            other = asyncio.create_task(tick())
            data = await fetcher.fetch(url_of(site), on_bytes=told.append)
            other.cancel()
            return data

    assert run(scenario) == bytes(size)
    assert sum(told) == size and max(told) <= 256 << 10 and turns >= len(told)


def test_compressed_data_that_breaks_off_is_an_error() -> None:
    async def scenario() -> None:
        packed = gzip.compress(random.Random(0).randbytes(5000))[:-100]
        async with running(answer(response(packed, content_encoding="gzip"))) as site, fetching(site) as fetcher:
            await fetcher.fetch(url_of(site))

    with pytest.raises(RequestError, match="compression"):
        run(scenario)


class Full(Exception):
    """No more bytes may be kept."""


def test_bytes_are_counted_as_they_come_so_that_a_refusal_ends_a_fetch_early() -> None:
    told: list[int] = []

    def on_bytes(count: int) -> None:
        told.append(count)
        if sum(told) > 1 << 20:
            raise Full

    async def scenario() -> None:
        async with running(ENDLESS_BODY) as site, fetching(site, timeout_s=30) as fetcher:
            with pytest.raises(Full):
                await fetcher.fetch(url_of(site), on_bytes=on_bytes)
            await nothing_left(fetcher, site)

    run(scenario)
    assert max(told) <= 1 << 18


def test_a_file_is_counted_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(bytes(5000))
    monkeypatch.setattr("saccade.media.fetch._read_regular", lambda *_: pytest.fail("read before it was counted"))

    def on_bytes(count: int) -> None:
        assert count == 5000
        raise Full

    async def scenario() -> None:
        fetcher = Fetcher(FetchPolicy(allowed_local_path=tmp_path), ssl_context=TRUST)
        with pytest.raises(Full):
            await fetcher.fetch(f"file://{tmp_path}/a.png", on_bytes=on_bytes)

    run(scenario)
