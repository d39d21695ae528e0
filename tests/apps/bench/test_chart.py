"""Plots of a load."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from saccade.apps.bench.chart import distributions, rates
from saccade.apps.bench.goodput import Trial
from saccade.apps.bench.load import LoadResult, Part, Result, Server
from saccade.apps.bench.report import Slo, figures
from saccade.apps.bench.stream_client import RequestSample
from saccade.cli.main import main
from tests.helpers.fakes.fake_chat_server import fake_chat_server

SPACE = "{http://www.w3.org/2000/svg}"


def result(ttft: float, gap: float = 0.01, tokens: int = 3, error: str | None = None) -> Result:
    times = [ttft + gap * i for i in range(tokens)]
    return Result(0, False, 0.0, RequestSample(0.0, times, times[-1] if times else 0.0, 10, tokens, error))


def curves(svg: str) -> list[list[tuple[float, float]]]:
    lines = [line.attrib["points"] for line in ElementTree.fromstring(svg).iter(f"{SPACE}polyline")]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", line)] for line in lines]


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SPACE}text")]


def test_a_distribution_rises_from_nothing_to_all_of_its_times() -> None:
    svg = distributions({"image": [result(0.001 * i) for i in range(1, 1000)]}, Slo())
    first, between = curves(svg)
    for line in (first, between):
        assert line == sorted(line, key=lambda point: (point[0], -point[1])), "never falls"
        assert (line[0][1], line[-1][1]) == (300.0, 60.0), "0 and 100 %"
    middle = min(first, key=lambda point: abs(point[1] - 180.0))
    level = re.search(r'd="M([\d.]+) 300\.0L', svg)
    assert level and middle[0] == pytest.approx(float(level[1]), abs=2.0), "half came within the 500 ms"


def test_each_group_has_a_curve_and_a_name_that_is_escaped() -> None:
    svg = distributions({"a <b>": [result(0.1)], "text": [result(0.2)]}, Slo())
    assert len(curves(svg)) == 4 and {"a <b>", "text"} <= set(words(svg))


def test_what_failed_or_had_one_token_has_no_times_between() -> None:
    svg = distributions({"a": [result(0.1, tokens=1), result(0.1, tokens=0, error="500: no")]}, Slo())
    assert len(curves(svg)) == 1
    assert not curves(distributions({"a": [result(0.1, tokens=0, error="500: no")]}, Slo()))


def test_times_grow_with_the_rate_and_marks_say_what_was_kept() -> None:
    trials = [Trial(rate, figures([result(0.1 * rate, 0.001 * rate)], Slo()), rate < 5) for rate in (4.0, 8.0, 2.0)]
    svg = rates(trials, Slo())
    for line in curves(svg):
        assert [x for x, _ in line] == sorted(x for x, _ in line), "by rate"
        assert [y for _, y in line] == sorted((y for _, y in line), reverse=True), "upwards"
    fills = [mark.attrib["fill"] for mark in ElementTree.fromstring(svg).iter(f"{SPACE}circle")]
    assert [fill == "#ffffff" for fill in fills] == [False, False, True] * 2
    assert "service level: 500 ms" in words(svg) and "service level: 25 ms" in words(svg)


def test_a_search_in_which_everything_failed_is_still_a_plot() -> None:
    svg = rates([Trial(1.0, figures([result(0.1, tokens=0, error="500")], Slo()), False)], Slo())
    assert "requests/s" in words(svg)


def test_the_command_plots_a_load(tmp_path: Path) -> None:
    plot = tmp_path / "a.svg"
    with fake_chat_server(first_s=0.01, gap_s=0.002) as fake:
        given = ["--url", fake.url, "--requests", "4", "--clients", "2", "--tokens", "3", "--processes", "1"]
        assert main(["bench", "text", *given, "--quiet", "--plot", str(plot)]) == 0
    assert len(curves(plot.read_text())) == 2 and "text" in words(plot.read_text())


def test_the_command_plots_a_search_for_goodput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_load(server: Server, parts: list[Part], *args: object, **how: object) -> LoadResult:
        clients, rate = parts[0].clients, parts[0].rate or 0
        ttft = clients / 4 if clients else 1.0 if rate > 3 else 0.1
        return LoadResult([result(ttft)] * parts[0].jobs, [])

    monkeypatch.setattr("saccade.cli.bench_load.run_load", fake_load)
    plot = tmp_path / "a.svg"
    assert main(["bench", "image", "--model", "m", "--goodput", "--plot", str(plot)]) == 0
    assert "first token: p99 in milliseconds" in words(plot.read_text())


def test_no_other_file_than_an_svg_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server() as fake:
        assert main(["bench", "text", "--url", fake.url, "--plot", str(tmp_path / "a.png")]) == 2
    assert "a.png is not an .svg file" in capsys.readouterr().err
    assert not fake.bodies and not list(tmp_path.iterdir())
