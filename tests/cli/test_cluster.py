"""`saccade cluster status`: the table, and what a server that cannot be asked gives."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.cli.cluster import status_table
from saccade.cli.main import main
from tests.helpers.servers.serving import free_port

READY = {
    "role": "engine", "index": 0, "node": "alpha", "pid": 17, "device": "GPU 3, H200", "state": "ready", "restarts": 1,
    "last_error": "it was ended by signal 9", "kv_use": 0.256, "queued_work": 4096, "running": 5, "waiting": 2,
}  # fmt: skip


def worker(**changes: Any) -> dict[str, Any]:
    return {**READY, **changes}


def test_a_row_says_who_is_where_and_how_full() -> None:
    header, row = status_table([READY]).splitlines()
    assert header.split("  ")[0].strip() == "worker"
    assert row.split() == ["engine", "0", "alpha", "17", "GPU", "3,", "H200", "ready", "26%", "4096", "5", "2", "1"]


def test_unknown_values_are_dashes_and_columns_align() -> None:
    lost = worker(index=10, node=None, pid=None, device=None, kv_use=None, queued_work=None)
    lines = status_table([READY, lost]).splitlines()
    assert lines[2].split() == ["engine", "10", "-", "-", "-", "ready", "-", "-", "5", "2", "1"]
    assert {line.index(word) for line, word in zip(lines, ("state", "ready", "ready"), strict=True)} == {
        lines[0].index("state")
    }


def test_a_worker_that_is_not_ready_says_why() -> None:
    text = status_table([worker(state="restarting", last_error="no Ray cluster answers"), READY])
    assert text.splitlines()[-1] == "engine 0: no Ray cluster answers"


def test_no_server_is_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["cluster", "status", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"saccade: no server answers at {url}") and "--url" in error and error.count("\n") == 1


def test_a_url_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status", "--url", "localhost:8000"]) == 1
    assert "--url" in capsys.readouterr().err
