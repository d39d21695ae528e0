"""Batches inside a server: each request is sent once, cancelling stops, and a restart goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from saccade.apps.batch.batch_records import BatchRecord
from saccade.helpers.process import HelperProcess, Reply
from saccade.options.server import ServerOptions
from saccade.server import batch_jobs
from saccade.server.accounts import Account
from saccade.server.batch_jobs import BatchJobs
from saccade.server.errors import ApiError, json_response
from saccade.server.http.auth import Tenants
from saccade.server.http.in_process import post
from saccade.server.http.limits import AdmissionGate
from saccade.server.tenant_file import TenantSettings
from tests.helpers.servers.full_disk import full_disk

CHAT = "/v1/chat/completions"
WAITS = {"id": "w", "wait": True}


class App:
    """Answers a body's `status`; waits first, where it has `wait`."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.tenants: set[str] = set()
        self.open = self.most_open = 0
        self.bodies: list[bytes] = []
        self.go = asyncio.Event()
        self.busy = 0  # so many requests are told to come again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append(await Request(scope, receive).body())
        body = json.loads(self.bodies[-1])
        self.asked[body["id"]] += 1
        self.tenants.add(scope["caller"].account.name)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if body.get("wait"):
                await self.go.wait()
            await asyncio.sleep(0)
        finally:
            self.open -= 1
        status = 429 if self.busy else body.get("status", 200)
        self.busy = max(0, self.busy - 1)
        await json_response({"id": body["id"]}, status, {"retry-after": "0"})(scope, receive, send)


class World:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.server = ServerOptions(batch_dir=str(folder), batch_concurrency=2, **options)
        self.app = App()
        self.charged: Counter[str] = Counter()  # processor seconds
        self.jobs = self.start()

    def start(self) -> BatchJobs:
        gate = AdmissionGate(100, 1, 1, engine_bytes=int, on_refusal=str)
        jobs = BatchJobs(self.server, Tenants(self.server), gate, lambda: 10_000, self.charge)
        jobs.connect(self.app)
        return jobs

    def charge(self, account: Account, seconds: float) -> None:
        self.charged[account.name] += seconds

    def batch(self, *bodies: dict[str, Any], owner: str = "", **fields: Any) -> BatchRecord:
        entries = (
            {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body, **fields}
            for number, body in enumerate(bodies)
        )
        return self.batch_of(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries), owner)

    def batch_of(self, data: bytes, owner: str = "") -> BatchRecord:
        store = self.jobs.store
        with store.draft(owner) as draft:
            draft.write(data)
            file = draft.save("in.jsonl", "batch")
        record = store.create_batch(owner, CHAT, file.id, None)
        self.jobs.add(record)
        return record

    def lines(self, file_id: str | None) -> list[str]:
        assert file_id is not None
        return sorted(json.loads(line)["custom_id"] for line in self.jobs.store.data(file_id).open())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def test_answers_and_errors_are_two_files(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        world.app.busy = 3
        record = world.batch(*({"id": str(n), "status": 400 if n == 3 else 200} for n in range(6)))
        await until(lambda: record.is_final)
        assert record.status == "completed" and record.view()["request_counts"] == {
            "total": 6,
            "completed": 5,
            "failed": 1,
        }
        assert world.lines(record.output_file_id) == ["c0", "c1", "c2", "c4", "c5"]
        assert world.lines(record.error_file_id) == ["c3"]
        assert world.app.asked.total() == 6 + 3 and world.app.most_open <= 2
        await world.jobs.close()

    asyncio.run(run())


def test_cancelling_stops_sending_and_keeps_what_was_answered(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        first = world.batch(*({"id": str(n), "wait": n > 0} for n in range(9)))
        second = world.batch({"id": "second"})
        await until(lambda: world.app.open == 2 and first.completed == 1)
        await world.jobs.cancel(second)  # waits for its turn
        assert second.status == "cancelled"
        await world.jobs.cancel(first)
        await until(lambda: first.is_final)
        assert first.status == "cancelled" and world.lines(first.output_file_id) == ["c0"]
        assert world.app.asked.total() == 3 and world.app.open == 0
        await world.jobs.close()

    asyncio.run(run())


def test_a_restart_goes_on_and_sends_nothing_again_that_has_an_answer(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        record = world.batch(*({"id": str(n), "wait": n >= 4, "status": 400 if n == 1 else 200} for n in range(8)))
        await until(lambda: world.app.open == 2 and record.completed + record.failed == 4)
        await world.jobs.close()
        assert record.status == "in_progress"
        world.app.go.set()
        world.jobs = world.start()
        world.jobs.resume()
        resumed = world.jobs.store.batch("", record.id)
        await until(lambda: resumed.is_final)
        assert resumed.status == "completed" and (resumed.total, resumed.completed, resumed.failed) == (8, 7, 1)
        assert all(world.app.asked[str(n)] == 1 for n in range(4))
        await world.jobs.close()

    asyncio.run(run())


def test_requests_run_as_their_tenant_and_fail_without_one(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path, api_key=("key",))
        name = next(iter(Tenants(world.server).read()))
        known, unknown = world.batch({"id": "0"}, owner=name), world.batch({"id": "1"}, owner="gone")
        await until(lambda: known.is_final and unknown.is_final)
        assert known.status == "completed" and world.app.tenants == {name}
        assert world.charged.keys() == {name} and world.charged[name] > 0, "its file was read for it"
        assert unknown.status == "failed" and "not one of this server's" in str(unknown.error)
        await world.jobs.close()

    asyncio.run(run())


def test_a_batch_expires(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        first = world.batch({"id": "0", "wait": True})
        await until(lambda: world.app.open)
        late = world.batch({"id": "1"})
        await world.jobs.close()
        for record in (first, late):
            record.expires_at = 1
            world.jobs.store.save(record)
        world.jobs = world.start()
        world.jobs.resume()
        resumed = world.jobs.store.batches("")
        await until(lambda: all(record.is_final for record in resumed))
        assert {record.status for record in resumed} == {"expired"} and not world.app.asked["1"]
        await world.jobs.close()

    asyncio.run(run())


def test_a_line_for_another_endpoint_is_an_error_of_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        record = world.batch({"id": "0"}, url="/v1/completions")
        await until(lambda: record.is_final)
        assert record.status == "completed" and record.failed == 1 and not world.app.asked
        await world.jobs.close()

    asyncio.run(run())


@pytest.mark.parametrize(("data", "why"), [(b"{}\n" * 3, "more than 2 lines"), (b"", "no lines"), (b"\n", "no lines")])
def test_a_file_with_too_many_lines_or_none_fails(
    data: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_jobs, "MAX_LINES", 2)

    async def run() -> None:
        world = World(tmp_path)
        record = world.batch_of(data)
        await until(lambda: record.is_final)
        assert record.status == "failed" and why in str(record.error)
        await world.jobs.close()

    asyncio.run(run())


def test_the_bytes_of_a_body_go_to_the_route_and_those_of_its_answer_into_the_results(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        body = b'{ "id":"0","x":  1.50e+2, "y":"\\u00e9" }'
        record = world.batch_of(b'{"body":' + body + b',"url":"%s","method":"POST","custom_id":"a"}' % CHAT.encode())
        await until(lambda: record.is_final)
        assert world.app.bodies == [body]
        assert (
            b', "body": {"id":"0"}}, "error": null}' in world.jobs.store.data(str(record.output_file_id)).read_bytes()
        )
        await world.jobs.close()

    asyncio.run(run())


def test_a_large_body_comes_in_pieces_and_others_have_turns_between_them() -> None:
    body = bytes(range(256)) * 1000
    pieces: list[bytes] = []
    turns: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async for piece in Request(scope, receive).stream():
            pieces.append(piece)
        await json_response({})(scope, receive, send)

    async def neighbour() -> None:
        while True:
            turns.append(len(pieces))
            await asyncio.sleep(0)

    async def run() -> None:
        other = asyncio.create_task(neighbour())
        assert (await post(app, Account("a", TenantSettings()), "a", CHAT, body)).status == 200
        other.cancel()

    asyncio.run(run())
    assert b"".join(pieces) == body and {1, 2, 3} <= set(turns)


def test_a_body_that_no_server_could_answer_is_refused_alone_and_before_it_is_decoded(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        record = world.batch({"id": "0", "x": [[]] * 110_000}, {"id": "1"})
        await until(lambda: record.is_final)
        assert (record.status, record.failed, record.completed) == ("completed", 1, 1)
        error = json.loads(world.jobs.store.data(str(record.error_file_id)).read_bytes())
        assert error["custom_id"] == "c0" and "line 1: the body holds more than" in error["error"]["message"]
        assert world.app.asked == {"1": 1}
        await world.jobs.close()

    asyncio.run(run())


def test_a_restart_goes_on_after_an_id_that_no_text_can_have(tmp_path: Path) -> None:
    """`\\ud800` is no character: as a result it would be another one than in the input."""

    async def run() -> None:
        world = World(tmp_path)
        entry = json.dumps({"custom_id": "\ud800", "method": "POST", "url": CHAT, "body": {"id": "0"}})
        good = {"custom_id": "\u00e9", "method": "POST", "url": CHAT, "body": {"id": "1"}}
        record = world.batch_of(f"{entry}\n{json.dumps(good)}\n{json.dumps({**good, 'body': WAITS})}".encode())
        await until(lambda: world.app.open and record.completed + record.failed == 2)
        await world.jobs.close()
        world.app.go.set()
        world.jobs = world.start()
        world.jobs.resume()
        resumed = world.jobs.store.batch("", record.id)
        await until(lambda: resumed.is_final)
        assert (resumed.status, resumed.completed, resumed.failed) == ("completed", 2, 1), resumed.error
        await world.jobs.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_batch_that_is_being_read_ends_at_once(
    is_cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is ended; a server that ends leaves the batch for its next start."""
    helpers: list[HelperProcess] = []

    class Stuck(HelperProcess):
        def ask(self, parts: Any, seconds: float, fds: Any = ()) -> Reply:
            helpers.append(self)
            return super().ask([b"spin"], 1000)

        def close(self) -> None:
            assert threading.current_thread() is not threading.main_thread(), "the server's loop waits for no process"
            super().close()

    monkeypatch.setattr(batch_jobs, "HelperProcess", Stuck)
    monkeypatch.setattr(batch_jobs, "_LINE_HELPER", "tests.helpers.servers.odd_helper")

    async def run() -> None:
        world = World(tmp_path)
        record = world.batch({"id": "0"})
        await until(lambda: len(helpers) == 1 and helpers[0].pid)
        waits = world.batch({"id": "1"}, owner="b"), world.batch({"id": "2"}, owner="c")  # for a turn to be read
        await until(lambda: len(helpers) == 2 and helpers[1].pid)
        if is_cancelled:
            await world.jobs.cancel(record)
            await until(lambda: record.is_final)
            assert record.status == "cancelled" and helpers[0].pid is None
            assert all(other.status == "validating" for other in waits)
        await world.jobs.close()
        assert all(helper.pid is None for helper in helpers)
        assert all(other.status == "validating" for other in waits)

    asyncio.run(run())


def test_a_full_disk_stops_a_batch_which_the_next_start_goes_on_with(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        record = world.batch(*({"id": str(n), "wait": n > 1} for n in range(6)))
        await until(lambda: record.completed == 2 and world.app.open)
        with full_disk(world.jobs.store.results(record).stat().st_size + 10):
            world.app.go.set()
            await until(lambda: record.is_final)
            with pytest.raises(ApiError, match="cannot be written: File too large; nothing was changed") as error:
                await world.jobs.in_thread("", "", write_whole_file, tmp_path)
            assert error.value.status == 507
        assert record.status == "failed" and "the next start of the server goes on" in str(record.error)
        world.jobs.store.check_conservation()
        await world.jobs.close()
        world.jobs = world.start()
        world.jobs.resume()
        resumed = world.jobs.store.batch("", record.id)
        await until(lambda: resumed.is_final)
        assert (resumed.status, resumed.completed) == ("completed", 6)
        assert world.lines(resumed.output_file_id) == [f"c{n}" for n in range(6)]
        assert world.app.asked["0"] == world.app.asked["1"] == 1
        world.jobs.store.check_conservation()
        await world.jobs.close()

    asyncio.run(run())


def test_a_batch_whose_file_is_gone_at_the_next_start_ends_with_the_results_that_it_has(tmp_path: Path) -> None:
    """Where the disk was full it had failed, so its file could be deleted."""

    async def run() -> None:
        world = World(tmp_path)
        record = world.batch({"id": "0"}, {"id": "1", "wait": True})
        await until(lambda: record.completed == 1 and world.app.open)
        await world.jobs.close()
        world.jobs.store.remove_file(record.input_file_id)
        world.jobs = world.start()
        world.jobs.resume()
        resumed = world.jobs.store.batch("", record.id)
        await until(lambda: resumed.is_final)
        assert resumed.status == "failed" and "there is no file" in str(resumed.error)
        assert world.lines(resumed.output_file_id) == ["c0"]
        await world.jobs.close()

    asyncio.run(run())


def test_clients_take_turns_at_a_slow_disk(tmp_path: Path) -> None:
    async def run() -> None:
        jobs = World(tmp_path).jobs
        disk = threading.Event()
        begun: list[str] = []

        def write(client: str) -> None:
            begun.append(client)
            disk.wait(0 if client == "kb" else 60)

        uploads = [asyncio.ensure_future(jobs.in_thread("", "ka", write, "ka")) for _ in range(4)]
        await until(lambda: begun)
        await jobs.in_thread("", "kb", write, "kb")
        assert begun == ["ka", "kb"]
        disk.set()
        await asyncio.gather(*uploads)
        await jobs.close()
        jobs.disk.close()

    asyncio.run(run())


def write_whole_file(folder: Path) -> None:
    (folder / "more").write_bytes(bytes(1 << 20))
