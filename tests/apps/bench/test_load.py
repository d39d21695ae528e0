"""Loads, what they report, and the command."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from saccade.apps.bench.goodput import FIRST_SHARE, MAX_TRIALS, best, find_goodput, saturated, summary
from saccade.apps.bench.load import LoadResult, Part, Result, Server, run_load
from saccade.apps.bench.report import Figures, Slo, client_warning, figures, table
from saccade.apps.bench.stream_client import RequestSample
from saccade.apps.bench.workloads import WORKLOADS, RequestShape
from saccade.cli import bench
from saccade.cli.main import main
from tests.helpers.fakes.fake_chat_server import fake_chat_server

SHAPE = RequestShape("fake", sizes=((64, 48), (32, 32)), tokens=3)


def result(due: float, ttft: float, gap: float, tokens: int = 5, error: str | None = None) -> Result:
    times = [due + ttft + gap * i for i in range(tokens)]
    return Result(0, False, due, RequestSample(due, times, times[-1], 10, tokens, error))


# --- workloads ----------------------------------------------------------------------------------------------------


def images_in(body: bytes) -> list[Image.Image]:
    parts = [part for message in json.loads(body)["messages"] for part in message["content"] if isinstance(part, dict)]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_new_images_differ_and_take_their_sizes_in_turn() -> None:
    jobs = [WORKLOADS["image"](SHAPE, number, random.Random(number)) for number in range(4)]
    sizes = [image.size for job in jobs for image in images_in(job.bodies[0])]
    assert sizes == [(64, 48), (32, 32)] * 2
    assert len({job.bodies[0] for job in jobs}) == 4 and all(job.has_images for job in jobs)


def test_a_catalogue_repeats_its_images_the_first_ones_most() -> None:
    rng = random.Random(0)
    shape = RequestShape("fake", sizes=((32, 32),), catalogue=8, zipf=1.5)
    seen = [images_in(WORKLOADS["catalogue"](shape, i, rng).bodies[0])[0].tobytes() for i in range(60)]
    counts = sorted((seen.count(one) for one in set(seen)), reverse=True)
    assert len(counts) <= 8 and counts[0] > 3 * counts[-1]


def test_a_conversation_brings_an_image_a_turn_and_all_before() -> None:
    job = WORKLOADS["conversation"](RequestShape("fake", sizes=((32, 32),), turns=3), 0, random.Random(0))
    assert [len(images_in(body)) for body in job.bodies] == [1, 2, 3]
    first, second = (json.loads(body)["messages"] for body in job.bodies[:2])
    assert second[: len(first)] == first, "prefixes are the same"


def test_text_has_no_images() -> None:
    job = WORKLOADS["text"](SHAPE, 0, random.Random(0))
    assert not images_in(job.bodies[0]) and not job.has_images


# --- loads --------------------------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_open() -> None:
    with fake_chat_server(first_s=0.02, gap_s=0.01) as fake:
        load = run_load(Server(fake.url), [Part("text", SHAPE, 20, clients=4)], processes=2, progress=False)
    assert len(load.results) == 20 and not any(one.sample.error for one in load.results)
    assert fake.most_open == 4 and fake.num_connections == 4
    assert all(body["stream"] and body["max_tokens"] == 3 and body["ignore_eos"] for body in fake.bodies)


def test_an_open_loop_sends_however_long_answers_take() -> None:
    part = Part("text", SHAPE, 30, rate=100.0)
    with fake_chat_server(first_s=1.0) as fake:
        load = run_load(Server(fake.url), [part], processes=1, progress=False)
    assert len(load.results) == 30
    assert fake.most_open > 15, "none waited for another"
    assert part.times() == sorted(part.times() or []) and len(set(part.times() or [])) == 30


def test_the_rate_of_arrivals_is_the_one_asked_for() -> None:
    times = Part("text", SHAPE, 4000, rate=50.0).times()
    assert times is not None and 4000 / times[-1] == pytest.approx(50.0, rel=0.05)


def test_processes_without_clients_leave_the_jobs_to_the_others() -> None:
    parts = [Part("text", SHAPE, 5, clients=1), Part("text", SHAPE, 4, rate=50.0)]
    with fake_chat_server() as fake:
        load = run_load(Server(fake.url), parts, processes=3, progress=False)
    assert sorted(one.part for one in load.results) == [0] * 5 + [1] * 4


def test_turns_of_a_conversation_follow_each_other() -> None:
    with fake_chat_server() as fake:
        shape = RequestShape("fake", sizes=((32, 32),), turns=3, tokens=1)
        load = run_load(Server(fake.url), [Part("conversation", shape, 2, clients=2)], processes=1, progress=False)
    assert len(load.results) == 6 and fake.most_open <= 2


# --- figures ------------------------------------------------------------------------------------------------------


def test_figures_are_percentiles_rates_and_what_kept_to_the_levels() -> None:
    results = [result(float(i), 0.1, 0.01) for i in range(9)] + [result(9.0, 0.8, 0.05)]
    found = figures([*results, result(3.0, 0.1, 0.01, error="500")], Slo(500.0, 25.0))
    assert (found.requests, found.errors) == (10, 1)
    assert found.seconds == pytest.approx(10.0) and found.requests_per_s == pytest.approx(1.0)
    assert found.goodput_per_s == pytest.approx(0.9), "one was late"
    assert found.ttft_ms[0] == pytest.approx(100.0) and found.itl_ms[0] == pytest.approx(10.0)
    assert found.output_tokens_per_s == pytest.approx(5.0)
    assert not found.keeps(Slo(500.0, 25.0)) and figures(results, Slo(900.0, 60.0)).keeps(Slo(900.0, 60.0))
    assert "9 errors" not in table({"text": found}) and "1 errors" in table({"text": found})


def test_times_count_from_when_a_request_was_due() -> None:
    late = result(1.0, 0.1, 0.01)
    late = late._replace(due=0.5)
    assert figures([late], Slo()).ttft_ms[0] == pytest.approx(600.0)


def test_clients_that_are_late_are_named() -> None:
    assert client_warning(LoadResult([], [0.001] * 100)) is None
    assert "late themselves, by 20.0 ms" in (client_warning(LoadResult([], [0.02] * 100)) or "")


def measured(limit: float, rate: float) -> Figures:
    late = 1.0 if rate > limit else 0.1
    return figures([result(float(i), late, 0.01) for i in range(5)], Slo())


@pytest.mark.parametrize("limit", [0.3, 1.7, 37.0])
def test_goodput_is_found_within_its_precision(limit: float) -> None:
    trials = find_goodput(lambda rate: measured(limit, rate), Slo(), first=1.0)
    found = best(trials)
    assert found is not None and 0.94 * limit <= found.rate <= limit
    assert len(trials) <= MAX_TRIALS


@pytest.mark.parametrize("limit", [40.0, 70.0, 99.0])
def test_a_search_that_begins_near_the_limit_takes_few_trials(limit: float) -> None:
    trials = find_goodput(lambda rate: measured(limit, rate), Slo(), first=FIRST_SHARE * 100.0)
    assert len(trials) <= 7 and summary(trials, Slo()).endswith("ms at p99")


def test_a_server_that_keeps_to_nothing_has_no_goodput() -> None:
    trials = find_goodput(lambda rate: measured(0.0, rate), Slo(), first=1.0)
    assert best(trials) is None and summary(trials, Slo()).startswith("goodput: 0.00")


@pytest.mark.parametrize(("limit", "words"), [(9.0, "the limit is below"), (math.inf, "the limit is higher")])
def test_a_search_ends_when_its_time_is_up(limit: float, words: str) -> None:
    clock = iter(range(100))
    trials = find_goodput(lambda rate: measured(limit, rate), Slo(), 8.0, seconds=3.0, clock=lambda: next(clock))
    assert len(trials) == 3 and words in summary(trials, Slo())


@pytest.mark.parametrize(
    ("capacity", "failing", "tried"),
    [(1e6, 0, [8, 32, 128, 512]), (130.0, 0, [8, 32, 128]), (3.0, 0, [8]), (1e6, 32, [8, 32])],
)
def test_closed_loops_get_more_clients_while_that_helps(capacity: float, failing: int, tried: list[int]) -> None:
    seen = []

    def measure(clients: int) -> Figures:
        seen.append(clients)
        found = figures([result(0.0, 0.1, 0.01)], Slo())
        return found._replace(requests_per_s=min(4.0 * clients, capacity), errors=int(clients == failing))

    assert saturated(measure, 8) == min(4.0 * tried[-1], capacity)
    assert seen == tried


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_prints_figures_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    with fake_chat_server(gap_s=0.001) as fake:
        given = ["--url", fake.url, "--requests", "6", "--clients", "2", "--tokens", "3", "--size", "64x48"]
        beside = ["--beside", "50", "--beside-images", "3", "--processes", "1", "--quiet"]
        assert main(["bench", "image", *given, *beside, *files]) == 0
    out = capsys.readouterr().out
    assert "image: 6 requests" in out and "beside: 3 requests" in out and "first token" in out
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["parts"]["image"]["requests"] == 6 and "api_key" not in written["arguments"]
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 6 + 3
    assert fake.bodies[0]["model"] == "fake", "the first that the server lists"


def test_the_command_fails_where_requests_do(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server(status=429) as fake:
        assert main(["bench", "text", "--url", fake.url, "--requests", "2", "--quiet"]) == 1
    assert "the server answers no request: 429: too large" in capsys.readouterr().err


def test_the_command_searches_for_goodput(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With new images in every trial, each as large a sample as its rate allows."""
    seeds = []

    def fake_load(server: Server, parts: list[Part], *args: object, **how: object) -> LoadResult:
        seeds.append(parts[0].seed)
        late = 1.0 if (parts[0].rate or 0) > 3 else 0.1
        return LoadResult([result(float(i), late, 0.01) for i in range(parts[0].jobs)], [])

    monkeypatch.setattr("saccade.cli.bench_load.run_load", fake_load)
    assert main(["bench", "image", "--model", "m", "--goodput"]) == 0
    out = capsys.readouterr().out
    assert "goodput: 3.00 requests/s" in out or "goodput: 2.9" in out
    assert len(set(seeds)) == len(seeds)


def test_sigterm_ends_the_clients_and_leaves_nothing() -> None:
    command = [sys.executable, "-m", "saccade.cli", "bench", "text", "--processes", "2", "--quiet", "--requests", "2"]
    with fake_chat_server(first_s=60.0) as fake:
        given = ["--url", fake.url, "--model", "fake"]
        process = subprocess.Popen([*command, *given], stderr=subprocess.PIPE, text=True)
        while not fake.bodies and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)  # ends with the last process that has it as stderr
    assert process.returncode == 128 + signal.SIGTERM and not errors


def test_an_address_without_a_scheme_works(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server() as fake:
        url = fake.url.removeprefix("http://")
        assert main(["bench", "text", "--url", url, "--requests", "2", "--clients", "1", "--quiet"]) == 0
    assert main(["bench", "text", "--url", "http://h:99999", "--model", "m"]) == 1
    assert "Port out of range" in capsys.readouterr().err


def test_the_command_says_where_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "text", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_model_and_a_server_are_not_measured_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "some/model", "--url", "http://127.0.0.1:9"]) == 2
    assert "'some/model' is an engine in this process, --url a server" in capsys.readouterr().err


@pytest.mark.parametrize("workload", ["text", "image", "conversation", "catalogue", "beside"])
def test_the_names_of_the_contract(workload: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    load = ["--workload", workload, "--concurrency", "2", "--requests", "2", "--beside-images", "2"]
    shape = ["--image-size", "64x48", "--input-tokens", "8", "--output-tokens", "3", "--turns", "2", "--processes", "1"]
    with fake_chat_server() as fake:
        given = ["--url", fake.url, "--model", "fake", "--slo-ttft-ms", "900", "--slo-itl-ms", "90"]
        assert main(["bench", *given, *load, *shape, "--json", str(file), "--quiet"]) == 0
    written = json.loads(file.read_text())
    assert written["requests_per_s"] > 0 and written["goodput_per_s"] > 0 and written["errors"] == 0
    for times in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert set(written[times]) == {"p50", "p90", "p99"}


def test_the_command_knows_all_workloads() -> None:
    assert list(bench.WORKLOADS) == sorted([*WORKLOADS, "beside"])


@pytest.mark.parametrize(
    "given", [["--size", "12"], ["--requests", "0"], ["--rate", "-1"], ["--rate", "inf"], ["--workload", "song"]]
)
def test_bad_arguments_are_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["bench", *given])
    assert error.value.code == 2
