"""What `benchmarks.soak` asks, notices and says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import httpx
import pytest

from benchmarks.soak import Settings, ask, soak
from benchmarks.soak_load import KINDS, Load
from benchmarks.soak_report import Answer, Fill, Run, print_report, summary, verdicts
from benchmarks.soak_watch import Sample, Watch, engine_of, percentile, theil_sen
from tests.helpers.servers.serving import MODEL, RunningServer

HOUR = 3600.0


def answered(kind: str, at: float, ms: float = 10, problem: str | None = None) -> Answer:
    return Answer(kind, at, ms / 1e3, 200, False, problem)


def made_run(growth: float, fds: float = 0) -> Run:
    """An hour in which the engine grows by so many MiB and descriptors."""
    run = Run(Watch({"api": 1, "engine": 2}), HOUR)
    for at in range(0, int(HOUR), 60):
        share = at / HOUR
        run.watch.samples["api"].append(Sample(at, 100, 80, 20, 5, 1, {"heap": 80}))
        owners = {"large blocks": 700 + growth * share, "heap": 100.0}
        memory = (900, sum(owners.values()))
        run.watch.samples["engine"].append(Sample(at, *memory, 4 + int(fds * share), 4, 0, owners))
        run.answers.append(answered("text", at, 10 + 10 * share))
        run.fills.append(Fill(at, 1.0, 0.2 + 0.4 * share))
    return run


# --- the load -----------------------------------------------------------------------------------------------------


def test_the_same_seed_asks_the_same_and_another_client_something_else() -> None:
    first, again, other = (Load(3, client, MODEL, has_video=True) for client in (0, 0, 1))
    calls = [first.next() for _ in range(10)]
    assert calls == [again.next() for _ in range(10)]
    assert calls != [other.next() for _ in range(10)]


def test_without_videos_none_is_asked_for() -> None:
    load = Load(0, 0, MODEL, has_video=False)
    assert "video" not in {load.choose() for _ in range(1000)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_answers_every_kind_as_it_should(kind: str, server: RunningServer) -> None:
    async def both() -> list[Answer]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            load = Load(0, 0, MODEL, has_video=True)
            client.headers["content-type"] = "application/json"
            return [await ask(client, load.of(kind), 0.0) for _ in range(2)]

    assert [answer.outcome for answer in asyncio.run(both())] == ["answered"] * 2


# --- what is noticed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status", "body", "outcome"),
    [
        ("text", 200, b"{}", "answered"),
        ("text", 500, b"{}", "failed"),
        ("text", 400, b"{}", "failed"),
        ("text", 429, b"{}", "refused"),
        ("text", 503, b"{}", "refused"),
        ("bad request", 400, b"{}", "answered"),
        ("bad request", 200, b"{}", "failed"),
        ("bad request", 500, b"{}", "failed"),
        ("stream", 200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', "answered"),
        ("stream", 200, b'data: {"choices": []}\n\ndata: {"error": {}}\n\n', "failed"),
        ("stream", 200, b"", "failed"),
        ("leaver", 200, b'data: {"choices": []}\n\n', "answered"),
    ],
)
def test_an_answer_is_judged_by_what_was_asked(kind: str, status: int, body: bytes, outcome: str) -> None:
    async def one() -> Answer:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
        async with httpx.AsyncClient(transport=transport, base_url="http://soak") as client:
            return await ask(client, Load(0, 0, MODEL, has_video=False).of(kind), 0.0)

    assert asyncio.run(one()).outcome == outcome


def test_a_broken_connection_is_a_failure() -> None:
    def break_off(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone", request=request)

    async def one() -> Answer:
        async with httpx.AsyncClient(transport=httpx.MockTransport(break_off), base_url="http://soak") as client:
            return await ask(client, Load(0, 0, MODEL, has_video=False).of("text"), 0.0)

    assert asyncio.run(one()).outcome == "failed"


def test_a_process_is_watched_until_it_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = Watch({"api": os.getpid(), "engine": child.pid})
    watch.look(0.0)
    child.kill()
    child.wait()
    watch.look(1.0)
    watch.look(2.0)
    assert [len(watch.samples[name]) for name in ("api", "engine")] == [3, 1]
    assert len(watch.deaths) == 1 and "engine" in watch.deaths[0]
    mine = watch.samples["api"][0]
    assert mine.rss >= mine.uss > 1 and mine.fds > 2 and mine.threads >= 1
    beside = mine.owners["helpers"] + mine.owners["files"]
    assert sum(mine.owners.values()) - beside == pytest.approx(mine.uss, rel=0.1)


def test_a_short_soak_finds_both_processes_and_no_failure(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch({"api": server.process.pid, "engine": engine_of(server.process.pid)})
    run = asyncio.run(soak(server.url, watch, Settings(2.0, 3, 20.0, 0.2, seed=0), is_quiet=True))
    assert run.answers and not run.failures and not run.has_failed
    assert all(len(samples) >= 3 for samples in watch.samples.values())
    assert run.fills[-1].kv > 0
    print_report(run, 8.0)
    assert f"{len(run.answers)}, 0 refused, 0 failed" in capsys.readouterr().out


# --- what is said -------------------------------------------------------------------------------------------------


def test_a_slope_is_that_of_most_points() -> None:
    line = [(float(at), 5 + at / 60) for at in range(0, 1200, 10)]
    spikes = [(at, value + 500 * (at % 100 == 0)) for at, value in line]
    assert theil_sen(line) == pytest.approx(60)
    assert theil_sen(spikes) == pytest.approx(60, rel=0.05)
    assert theil_sen(line * 20) == pytest.approx(60, rel=0.05)
    assert theil_sen(line[:3]) is None
    assert theil_sen([(1.0, 2.0)] * 20) is None


def test_percentiles_are_values_that_were_there() -> None:
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7.0], 0.5) == 7
    assert percentile([], 0.5) is None


def test_growth_is_told_with_the_caches_that_filled_meanwhile() -> None:
    api, engine, requests = verdicts(made_run(growth=100), steady=8)
    assert "api: memory steady" in api
    assert "engine: memory still growing" in engine and "+100.0 MiB" in engine and "large blocks +" in engine
    assert "encoder cache from 40% to" in engine and "kv cache" not in engine
    assert "60, 0 refused, 0 failed" in requests
    assert "engine: memory steady" in verdicts(made_run(growth=4), steady=8)[1]


def test_descriptors_that_grow_are_named() -> None:
    assert "fds grow" in verdicts(made_run(growth=0, fds=20), steady=8)[1]


def test_latency_drifts_by_kind() -> None:
    assert summary(made_run(growth=0))["drift_per_hour"]["text ms"] == pytest.approx(10)


def test_failures_and_deaths_fail_a_run() -> None:
    run = made_run(growth=0)
    assert not run.has_failed
    run.answers.append(answered("text", 1.0, problem="status 500"))
    assert run.has_failed and "1 x text: status 500" in verdicts(run, steady=8)[-1]
    run = made_run(growth=0)
    run.watch.deaths.append("engine ended")
    assert run.has_failed
