"""Requests as they came to a service, and figures split by whether they had images."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade.apps.bench.load import Part, Result
from saccade.apps.bench.report import Slo, figures_by_group, groups
from saccade.apps.bench.stream_client import RequestSample
from saccade.apps.bench.trace import TraceRequest, job_of, read_trace
from saccade.apps.bench.workloads import RequestShape
from saccade.cli.main import main
from saccade.errors import ConfigError
from tests.helpers.fakes.fake_chat_server import fake_chat_server

SHAPE = RequestShape("fake", words=3, tokens=5)
TEXT = {"at": 10.0, "words": 4, "output_tokens": 2}
IMAGES = {"at": 10.1, "input_tokens": 6, "output_tokens": 3, "images": ["64x48", "32x16"]}


def written(folder: Path, *requests: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in requests))
    return path


def content(body: bytes) -> tuple[list[tuple[int, int]], int]:
    """Sizes of the images, and words of the text."""
    parts = json.loads(body)["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    return [image.size for image in images], len(parts[-1]["text"].split())


def result(has_images: bool, part: int = 0) -> Result:
    return Result(part, has_images, 0.0, RequestSample(0.0, [0.1], 0.2, 1, 1, None))


def test_a_trace_is_read_in_the_order_of_arrival_and_begins_at_once(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, IMAGES, "", TEXT))
    assert [request.at for request in trace] == pytest.approx([0.0, 0.1])
    assert trace[0][1:] == (4, 2, ()) and trace[1][1:] == (6, 3, ((64, 48), (32, 16)))
    assert Part("trace", SHAPE, 2, trace=trace).times() == [request.at for request in trace]


def test_a_request_of_a_trace_is_sent_as_it_says() -> None:
    request = TraceRequest(0.0, 6, 3, ((64, 48), (32, 16)))
    job = job_of(request, SHAPE, random.Random(0))
    assert content(job.bodies[0]) == ([(64, 48), (32, 16)], 6) and job.has_images
    assert json.loads(job.bodies[0])["max_tokens"] == 3


def test_what_a_request_of_a_trace_leaves_out_the_load_says() -> None:
    job = job_of(TraceRequest(0.0, None, None, ()), SHAPE, random.Random(0))
    assert content(job.bodies[0]) == ([], 3) and not job.has_images
    assert json.loads(job.bodies[0])["max_tokens"] == 5


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", r"line 2: \[1\] is no object"),
        ({"words": 3}, "line 2: at is missing"),
        ({"at": "soon"}, "line 2: at is 'soon'"),
        ('{"at": NaN}', "line 2: at is nan"),
        ({"at": True}, "line 2: at is True"),
        ({"at": 1, "words": 0}, "line 2: words is 0"),
        ({"at": 1, "output_tokens": 1.5}, "line 2: output_tokens is 1.5"),
        ({"at": 1, "words": 1, "input_tokens": 1}, "line 2: words and input_tokens"),
        ({"at": 1, "images": "64x48"}, "line 2: images is '64x48'"),
        ({"at": 1, "images": ["64x48", "64"]}, r"line 2: images\[1\] is '64'"),
        ({"at": 1, "images": ["0x48"]}, r"line 2: images\[0\] is '0x48'"),
        ({"at": 1, "image": []}, "line 2: the field 'image' is unknown"),
    ],
)
def test_an_error_names_the_line_and_the_field(tmp_path: Path, line: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        read_trace(written(tmp_path, TEXT, line))


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_requests_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_trace(tmp_path / "trace.jsonl")


def test_a_part_that_mixes_both_is_split_and_no_other() -> None:
    results = [result(True), result(False), result(False), result(True, part=1)]
    found = groups(results, ["trace", "beside"])
    assert {name: len(some) for name, some in found.items()} == {
        "trace": 3,
        "trace, with images": 1,
        "trace, text alone": 2,
        "beside": 1,
    }


def test_rates_of_both_kinds_add_up_to_those_of_the_part() -> None:
    late = result(False)._replace(due=0.9, sample=RequestSample(0.9, [0.95], 1.0, 1, 1, None))
    rows = figures_by_group([result(True), result(True), late], ["trace"], Slo())
    rates = [rows[name].requests_per_s for name in ("trace", "trace, with images", "trace, text alone")]
    assert rates == pytest.approx([3.0, 2.0, 1.0])


def test_the_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, TEXT, IMAGES, {**TEXT, "at": 10.5})
    figures = tmp_path / "a.json"
    with fake_chat_server() as fake:
        given = ["--trace", str(trace), "--url", fake.url, "--processes", "2", "--quiet", "--json", str(figures)]
        assert main(["bench", *given]) == 0
    out = capsys.readouterr().out
    assert "trace: 3 requests in 0." in out
    assert "trace, with images: 1 requests" in out and "trace, text alone: 2 requests" in out
    assert [len(body["messages"][0]["content"]) for body in fake.bodies[-3:]] == [1, 3, 1]
    parts = json.loads(figures.read_text())["parts"]
    assert parts["trace"]["seconds"] >= 0.5 and parts["trace, with images"]["requests"] == 1


def test_requests_bounds_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, TEXT, TEXT, TEXT)
    with fake_chat_server() as fake:
        given = ["--trace", str(trace), "--requests", "2", "--url", fake.url, "--processes", "1", "--quiet"]
        assert main(["bench", *given]) == 0
    assert "trace: 2 requests" in capsys.readouterr().out


def test_a_trace_that_cannot_be_used_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--trace", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err
    assert main(["bench", "text", "--trace", str(written(tmp_path, TEXT))]) == 2
    assert "leave out the workload 'text'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--csv", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with fake_chat_server() as fake:
        assert main(["bench", "text", "--url", fake.url, flag, str(tmp_path / "none" / "a.svg")]) == 2
        (tmp_path / "folder.svg").mkdir()
        assert main(["bench", "text", "--url", fake.url, flag, str(tmp_path / "folder.svg")]) == 2
    assert f"{flag} {tmp_path / 'folder.svg'} cannot be written" in capsys.readouterr().err
    assert not fake.bodies
