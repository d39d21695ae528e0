"""Batches: every line gets one result, a run goes on where an earlier one ended, one error stops nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from saccade.batch.batch_file import BatchRequest, BatchResult, finished, read_request, read_requests
from saccade.batch.batch_run import BatchCounts, run_batch
from saccade.cli.main import main
from saccade.errors import ConfigError
from tests.helpers.serving import RunningServer, chat_body

CHAT = "/v1/chat/completions"


def line(custom_id: Any, body: Any = None, **fields: Any) -> str:
    entry = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {} if body is None else body}
    return json.dumps({**entry, **fields}) + "\n"


class Sender:
    """Answers with the custom_id, counts who is in flight, and is gone after some."""

    def __init__(self, gone_after: int | None = None) -> None:
        self.sent: list[str | None] = []
        self.open = self.most_open = 0
        self._gone_after = gone_after

    async def __call__(self, request: BatchRequest) -> BatchResult:
        if len(self.sent) == self._gone_after:
            raise ConfigError("no answer")
        self.sent.append(request.custom_id)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        status = int(request.body.get("status", 200))
        body = {"said": request.custom_id} if status == 200 else {"error": {"code": "bad", "message": "no"}}
        return BatchResult(request, status, "r", body)


def run(source: Path, results: Path, sender: Sender, concurrency: int = 3) -> BatchCounts:
    return asyncio.run(run_batch(source, results, sender, concurrency))


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
    assert found["batch_req_2"]["error"]["message"] == "line 2: it is not JSON"
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
    assert sorted(sender.sent) == [f"r{index}" for index in range(4, 10)]  # type: ignore[type-var]
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
        finished(path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (line(""), "custom_id"),
        (line(3), "custom_id"),
        (line("a", method="GET"), "POST"),
        (line("a", body=[]), "body must be"),
        (line("a", {"stream": True}), "streams nothing"),
        ("[]", "not an object"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_wrong_with_a_line_is_told(entry: str, words: str) -> None:
    problem = read_request(entry.encode(), 7).problem
    assert problem is not None and problem.startswith("line 7: ") and words in problem


def test_a_long_line_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.batch.batch_file.MAX_LINE_BYTES", 200)
    path = tmp_path / "in"
    path.write_text(line("a", {"x": "y" * 500}) + line("b"))
    first, second = read_requests(path)
    assert "more than 200 bytes" in (first.problem or "") and second.custom_id == "b" and second.line == 2


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
