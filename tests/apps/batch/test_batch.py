"""Batches: every line gets one result, a run goes on where an earlier one ended, one error stops nothing."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from saccade.apps.batch import line_helper
from saccade.apps.batch.batch_file import BatchResult, finished
from saccade.apps.batch.batch_lines import BatchRequest, batch_lines
from saccade.apps.batch.batch_lines import line_helper as reader
from saccade.apps.batch.batch_run import BatchCounts, in_one_line, retry_seconds, run_batch
from saccade.apps.batch.line_helper import PieceStart, Place, read_piece
from saccade.cli.main import main
from saccade.errors import ConfigError
from saccade.helpers.process import HelperProcess
from tests.helpers.servers.full_disk import full_disk
from tests.helpers.servers.serving import RunningServer, chat_body

CHAT = "/v1/chat/completions"


def line(custom_id: Any, body: Any = None, **fields: Any) -> str:
    entry = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {} if body is None else body}
    return json.dumps({**entry, **fields}) + "\n"


class Sender:
    """Answers with the custom_id, counts who is in flight, and is gone after some."""

    def __init__(self, gone_after: int | None = None) -> None:
        self.sent: list[str] = []
        self.open = self.most_open = 0
        self._gone_after = gone_after

    async def __call__(self, request: BatchRequest) -> BatchResult:
        if len(self.sent) == self._gone_after:
            raise ConfigError("no answer")
        custom_id = json.loads(request.custom_id)
        self.sent.append(custom_id)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        status = int(json.loads(request.body).get("status", 200))
        body = {"said": custom_id} if status == 200 else {"error": {"code": "bad", "message": "no"}}
        return BatchResult(request, status, "r", json.dumps(body).encode())


def run(source: Path, results: Path, sender: Sender, concurrency: int = 3) -> BatchCounts:
    helper = reader()
    try:
        with batch_lines(source, helper) as lines:
            return asyncio.run(run_batch(lines, results, sender, concurrency))
    finally:
        helper.close()


def places_of(path: Path) -> list[Place]:
    with path.open("rb") as stream:
        return read_piece(stream.fileno(), PieceStart(1, 0), lambda body: None).places


def results_in(path: Path) -> dict[str, Any]:
    return {entry["id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line(f"r{index}") for index in range(10)))
    return source, tmp_path / "out.jsonl"


def test_every_line_gets_its_result_and_few_are_open_at_a_time(files: tuple[Path, Path]) -> None:
    sender = Sender()
    assert run(*files, sender) == BatchCounts(10, 0, 0) and sender.most_open == 3
    found = results_in(files[1])
    assert {entry["response"]["body"]["said"] for entry in found.values()} == {f"r{index}" for index in range(10)}
    assert found["batch_req_1"]["error"] is None and found["batch_req_1"]["custom_id"] == "r0"


def test_one_bad_line_stops_no_other(tmp_path: Path) -> None:
    source, results = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a") + "{broken\n\n" + line("b", {"status": 400}) + line("c", url="/etc") + line("d"))
    assert run(source, results, Sender()) == BatchCounts(5, 0, 3)
    found = results_in(results)
    assert found["batch_req_2"]["error"]["message"] == "line 2: it is not JSON in UTF-8"
    assert found["batch_req_4"]["error"] == {"code": "bad", "message": "no"}
    assert found["batch_req_5"]["response"] is None and "url must be" in found["batch_req_5"]["error"]["message"]
    assert found["batch_req_6"]["response"]["status_code"] == 200


@pytest.mark.parametrize("damage", [b"", b'{"id": "batch_re', b'{"id": "batch_req_5", "custom'])
def test_a_run_goes_on_where_an_earlier_one_ended(files: tuple[Path, Path], damage: bytes) -> None:
    with pytest.raises(ConfigError, match="no answer"):
        run(*files, Sender(gone_after=4), 1)
    before = files[1].read_bytes()
    files[1].write_bytes(before + damage)
    sender = Sender()
    assert run(*files, sender) == BatchCounts(10, 4, 0)
    assert sorted(sender.sent) == [f"r{index}" for index in range(4, 10)]
    assert files[1].read_bytes().startswith(before) and len(results_in(files[1])) == 10


def test_results_of_another_input_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    run(*files, Sender())
    files[0].write_text(line("other"))
    with pytest.raises(ConfigError, match="belongs to another input"):
        run(*files, Sender())


@pytest.mark.parametrize("content", ["a diary\nof mine\n", "one line\n", "no line", '{"id": "mine"}', line("r0")])
def test_a_file_of_something_else_stays_as_it_was(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no result of a batch"):
        finished(path, lambda line, custom_id: None)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (line(""), "custom_id"),
        (line(3), "custom_id"),
        (line("a", method="GET"), "POST"),
        (line("a", body=[]), "body must be"),
        (line("a", {"stream": True}), "streams nothing"),
        (line("a", None, url="u" * 10_000), "url must be"),
        ("[]", "not an object"),
        (line("\ud800"), "not JSON in UTF-8"),
        (line("x" * 513), "custom_id"),
        (line("a", {"stream": "\ud800"}), "not JSON in UTF-8"),
        ('{"a": ' + "[" * 100_000, "not JSON"),
    ],
)
def test_what_is_wrong_with_a_line_is_told(entry: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(f"\n{entry}")
    (place,) = places_of(path)
    assert place.line == 2 and words in place.problem


def test_a_long_line_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_helper, "MAX_LINE_BYTES", 200)
    path = tmp_path / "in"
    path.write_text(line("a", {"x": "y" * 500}) + line("b"))
    first, second = places_of(path)
    assert "more than 200 bytes" in first.problem and not second.problem and second.line == 2


def test_custom_ids_and_bodies_are_passed_on_byte_by_byte(tmp_path: Path) -> None:
    """Spaces, escapes and numbers come out as they went in, also where other parts of a line look the same."""
    source, results = tmp_path / "in", tmp_path / "out"
    mark = "\ufeff"  # as some editors write it
    body = r'{"t": "\u00e9é", "x":1.50 , "y": {"body":{}}}'
    text = f'{{"body": {body} ,"custom_id":"\\u0061é\\n","x":{{}}, "method":"POST", "url":"{CHAT}"}}\r\n'
    source.write_text(f"{mark}{text}\n{text}", newline="")
    sent: list[BatchRequest] = []

    async def send(request: BatchRequest) -> BatchResult:
        sent.append(request)
        return BatchResult(request, 200, "r", b'{"a":  1.0}')

    with batch_lines(source, reader()) as lines:
        asyncio.run(run_batch(lines, results, send, 1))
    assert [(request.line, request.body.decode()) for request in sent] == [(1, body), (3, body)]
    assert results.read_text().splitlines()[0] == (
        r'{"id": "batch_req_1", "custom_id": "\u0061é\n", "response": '
        '{"status_code": 200, "request_id": "r", "body": {"a":  1.0}}, "error": null}'
    )


def test_a_file_of_many_lines_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_helper, "_PIECE_LINES", 3)
    monkeypatch.setattr(line_helper, "_PIECE_BYTES", 300)
    path = tmp_path / "in"
    path.write_text("".join(line(f"r{index}", {"x": "y" * 20 * index}) for index in range(20)))
    sizes, start, is_last = [], PieceStart(1, 0), False
    with path.open("rb") as stream:
        while not is_last:
            piece = read_piece(stream.fileno(), start, lambda body: None)
            sizes.append(len(piece.places))
            start, is_last = piece.end, piece.is_last
    assert max(sizes) == 3 and sizes[-2] == 1 and sum(sizes) == 20


def test_a_file_that_takes_too_long_to_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.apps.batch.batch_lines._SECONDS", 0.02)
    path = tmp_path / "in"
    path.write_bytes(b'{"a": "' + b"x" * (100 << 20))
    with pytest.raises(ConfigError, match="lines from 1 on cannot be read: they take more"):
        run(path, tmp_path / "out", Sender())


def test_an_input_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "/dev/zero"):
        command = ["run-batch", str(tmp_path / name), str(tmp_path / "out"), "--url", "http://127.0.0.1:1"]
        assert main(command) == 1
        with pytest.raises(ConfigError, match="not a plain file"), batch_lines(tmp_path / name, HelperProcess("none")):
            pass


def test_waits_are_bounded_however_often_a_server_was_busy() -> None:
    assert retry_seconds(b"", 0) == 0.1 and retry_seconds(b"", 10**6) == 30
    assert retry_seconds(b"7", 0) == 7 and retry_seconds(b"9" * 1000, 0) == 30


@pytest.mark.parametrize(
    ("content", "line"),
    [(b'{"a": 1.0}', b'{"a": 1.0}'), (b'{\n "a": 1.0\n}', b'{"a":1.0}'), (b"<p>\n", b'"<p>\\n"'), (b"", b'""')],
)
def test_an_answer_becomes_json_in_one_line(content: bytes, line: bytes) -> None:
    assert in_one_line(content) == line


def test_the_command_runs_a_batch_on_a_server(server: RunningServer, tmp_path: Path) -> None:
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("good", chat_body()) + line("bad", {"messages": []}))
    command = ["run-batch", "-i", str(source), "-o", str(results), "--url", server.url, "--quiet"]
    assert main(command) == 1
    found = results_in(results)
    assert found["batch_req_1"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert found["batch_req_2"]["response"]["status_code"] == 400
    assert main(command) == 0, "nothing is left to be done"
    assert main(["run-batch", str(source)]) == 2


def test_without_place_for_results_the_command_says_how_to_go_on(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"r{index}", chat_body()) for index in range(8)))
    command = ["run-batch", str(source), str(results), "--url", server.url, "--quiet", "--concurrency", "1"]
    with full_disk(1000):
        assert main(command) == 1
    told = capsys.readouterr().err
    assert told == f"saccade: {results} cannot be written: File too large; the same command goes on from what it has\n"
    assert main(command) == 0 and len(results_in(results)) == 8
