"""Log lines: text and JSON, one line a record, and the same form in worker processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from saccade.util import logs

logger = logging.getLogger("saccade.test_logs")


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    """What `set_up` changes is changed back."""
    before = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], level = before
    logging.root.setLevel(level)


def test_a_line_of_text_has_time_level_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info", "text", "engine 1")
    logger.warning("%d blocks", 3)
    time, level, rest = capsys.readouterr().err.split(" ", 2)
    assert time.endswith("Z") and len(time) == len("2026-01-31T12:00:00.123Z")
    assert (level, rest) == ("WARNING", "engine 1: 3 blocks\n")


def test_less_severe_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("error", "text")
    logger.warning("not this")
    logger.error("but this")
    assert "but this" in (err := capsys.readouterr().err) and "not this" not in err


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_message_can_forge_a_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info", form)
    logger.info("one\n2026-01-31T12:00:00.123Z ERROR two\u2028\x1b[31m")
    (line,) = capsys.readouterr().err.splitlines()
    assert "\\n2026" in line and "\x1b" not in line


def test_no_exception_can_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info", "text")
    try:
        raise ValueError("one\n2026-01-31T12:00:00.123Z ERROR two\x1b[31m\u2028three")
    except ValueError:
        logger.exception("failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR failed") and all(line.startswith("  ") for line in rest)
    assert any("two\\x1b[31m\\u2028three" in line for line in rest)


def test_json_has_a_field_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info", "json", "engine")
    logger.info("done", extra={"fields": {"request_id": "a-1", "status": 200}})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "saccade.test_logs",
        "process": "engine",
        "message": "done",
        "request_id": "a-1",
        "status": 200,
    }


def test_json_keeps_a_traceback_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info", "json")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    line = json.loads(capsys.readouterr().err)
    assert line["exception"].startswith("Traceback") and "broken" in line["exception"]


def test_a_worker_logs_in_the_servers_form(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "debug")
    logs.set_up_worker("encoder 2")
    logger.info("the server says this itself")
    logger.warning("memory is short")
    assert json.loads(capsys.readouterr().err)["process"] == "encoder 2"
