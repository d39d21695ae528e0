"""Loads on an engine in this process: the model inside the package, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade import LLM
from saccade.apps.bench.load import Part
from saccade.apps.bench.trace import TraceRequest
from saccade.apps.bench.workloads import RequestShape
from saccade.cli.bench_offline import run_offline
from saccade.cli.main import main

SHAPE = RequestShape("built in", sizes=((64, 48),), words=3, tokens=4, turns=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(use_tqdm=False) as made:
        yield made


def test_a_closed_loop_has_a_time_for_every_token(llm: LLM) -> None:
    load = run_offline(llm.engine, [Part("text", SHAPE, 5, clients=2)])
    assert len(load.results) == 5
    for result in load.results:
        sample = result.sample
        assert sample.error is None and len(sample.token_times) == sample.output_tokens == 4
        assert result.due <= sample.start < sample.token_times[0] <= sample.token_times[-1] <= sample.end
        assert sample.prompt_tokens > 3
    spans = [(result.due, result.sample.end) for result in load.results]
    assert all(sum(a <= start < b for a, b in spans) <= 2 for start, _ in spans), "so many at a time"
    assert not llm.engine.has_unfinished_requests()


def test_an_open_loop_sends_when_requests_are_due(llm: LLM) -> None:
    trace = (TraceRequest(0.0, 2, 2, ()), TraceRequest(0.3, 2, 3, ((64, 48),)))
    text, image = run_offline(llm.engine, [Part("trace", SHAPE, 2, trace=trace)]).results
    assert image.due - text.due == pytest.approx(0.3) and image.sample.start >= image.due
    assert (text.has_images, image.has_images) == (False, True)
    assert (text.sample.output_tokens, image.sample.output_tokens) == (2, 3)


def test_turns_of_a_conversation_follow_each_other(llm: LLM) -> None:
    first, second = run_offline(llm.engine, [Part("conversation", SHAPE, 1, clients=1)]).results
    assert first.sample.error is None and second.sample.error is None
    assert second.due >= first.sample.end and second.sample.prompt_tokens > first.sample.prompt_tokens


def test_parts_run_beside_each_other(llm: LLM) -> None:
    parts = [Part("text", SHAPE, 3, clients=1), Part("image", SHAPE, 2, rate=50.0)]
    load = run_offline(llm.engine, parts)
    assert sorted(result.part for result in load.results) == [0, 0, 0, 1, 1]
    assert not any(result.sample.error for result in load.results)


def test_a_refusal_is_an_error_and_the_others_go_on(llm: LLM) -> None:
    trace = (TraceRequest(0.0, 10**6, 2, ()), TraceRequest(0.0, 2, 2, ()))
    errors = [result.sample.error for result in run_offline(llm.engine, [Part("t", SHAPE, 2, trace=trace)]).results]
    assert sum(error is None for error in errors) == 1 and len(errors) == 2


def test_the_command_measures_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--requests", "3", "--clients", "2", "--tokens", "3", "--size", "64x48", "--quiet"]
    assert main(["bench", "image", "--offline", *given, "--json", str(tmp_path / "a.json")]) == 0
    assert "image: 3 requests" in capsys.readouterr().out
    figures = json.loads((tmp_path / "a.json").read_text())["parts"]["image"]
    assert figures["output_tokens_per_s"] > 0 and figures["ttft_ms"]["p50"] > 0 and figures["itl_ms"]["p50"] > 0


def test_the_command_searches_the_most_images_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--max-images", "2", "--tokens", "1", "--size", "32x32", "--quiet"]
    assert main(["bench", "most-images", "--offline", *given]) == 0
    assert "most images: 2 or more" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--model", "--processes"])
def test_flags_of_a_server_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "text", "--offline", "some/model", flag, "2"]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--load-format dummy", "--dtype float32"])
def test_flags_of_an_engine_are_refused_for_a_server(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "text", *flag.split()]) == 2
    assert f"{flag.split()[0]} is of an engine in this process" in capsys.readouterr().err


def test_a_workload_in_the_place_of_the_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--offline", "text"]) == 2
    assert "put the workload first: saccade bench text --offline" in capsys.readouterr().err
