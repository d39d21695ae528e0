"""Loads of pages: what is drawn, and the table of several numbers of clients."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

import pytest
from PIL import Image

from saccade.apps.bench.levels import ms_between, seconds_of
from saccade.apps.bench.workloads import WORKLOADS, RequestShape
from saccade.cli.main import main
from saccade.media.pdf import Pdf
from tests.helpers.fakes.fake_chat_server import fake_chat_server

METRICS = """# TYPE saccade:queue_seconds histogram
saccade:queue_seconds_sum 1.5
saccade:tenant_processor_seconds_total{tenant="a"} 2.0
saccade:tenant_processor_seconds_total{tenant="b"} 1e-1
saccade:steps_total 7.0
"""


def test_pages_are_images_of_the_size_or_new_pdfs_a_request_for_each_page() -> None:
    image, other = (WORKLOADS["documents"](RequestShape("m", ((320, 200),)), 0, random.Random(i)) for i in range(2))
    (part, _) = json.loads(image.bodies[0])["messages"][0]["content"]
    drawn = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
    assert drawn.size == (320, 200) and image.bodies != other.bodies
    assert 0.01 < sum(drawn.convert("L").histogram()[:128]) / (320 * 200) < 0.5, "text on white"
    job = WORKLOADS["documents"](RequestShape("m", pages=2), 0, random.Random(0))
    files = [json.loads(body)["messages"][0]["content"][0] for body in job.bodies]
    assert [file["pages"] for file in files] == ["1", "2"] and files[0]["file"] == files[1]["file"]
    pdf = Pdf(base64.b64decode(files[0]["file"]["file_data"].partition(",")[2]))
    assert pdf.boxes(9)[0] == 2 and len(pdf.text(0).split()) > 200 and pdf.text(0) != pdf.text(1)


def test_what_the_server_spent_is_of_the_requests_of_a_row() -> None:
    after = seconds_of(METRICS)
    assert after == {"queue": 1.5, "processor": 2.1} and not seconds_of("<html>")
    assert ms_between({"queue": 0.5}, after, 10) == {"queue": 100.0, "processor": 210.0}


def test_a_table_has_a_row_for_each_number_of_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--concurrency", "1,3", "--tokens", "2", "--size", "64x48", "--quiet", "--processes", "1"]
    with fake_chat_server() as fake:
        assert main(["bench", "documents", "--url", fake.url, *given, "--json", str(tmp_path / "a.json")]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert "at a time" in title and [row.split()[0] for row in rows] == ["1", "3"]
    levels = json.loads((tmp_path / "a.json").read_text())["levels"]
    assert [level["requests"] for level in levels] == [16, 24] and not levels[0]["server_ms"]
    assert main(["bench", "image", "--url", fake.url, "--concurrency", "1,3", "--csv", str(tmp_path / "a")]) == 2
    assert "leave out --csv" in capsys.readouterr().err
