"""Files that are named: no pipe or device makes a reader wait, and a full disk costs no file."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.apps.batch.batch_lines import batch_lines, line_helper
from saccade.apps.bench.trace import read_trace
from saccade.apps.evaluation.report import check_markers
from saccade.apps.plan.calibration import read_calibration
from saccade.cli.main import main
from saccade.cli.writable import check_writable
from saccade.errors import ConfigError, RequestError
from saccade.media.load import load_image
from saccade.options.engine import MediaPolicy, Options
from saccade.options.server import ServerOptions
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.server.config import load_settings
from saccade.server.http.tls import tls_context
from saccade.server.tenant_file import read_tenants
from saccade.util.plain_files import open_plain, read_plain, read_text, write_whole
from tests.helpers.servers.full_disk import full_disk


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_what_is_no_file_is_named_and_nothing_waits(pipe: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        os.symlink(pipe, tmp_path / "link")
        for path, kind in (
            (pipe, "pipe"),
            (tmp_path / "link", "pipe"),
            ("/dev/zero", "device"),
            ("/dev/tty", "device"),
        ):
            with pytest.raises(OSError, match=f"{kind}, not a plain file|No such device or address"):
                read_plain(path, 10)
        for path, text in (
            (tmp_path, "directory|folder"),
            (tmp_path / "socket", "No such device"),
            ("a\0", "valid path"),
        ):
            with pytest.raises(OSError, match=text):
                read_plain(path, 10)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="pipe, not a plain file"):
        read_plain(pipe, 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    os.symlink(file, tmp_path / "link")
    assert read_plain(tmp_path / "link", 10) == b"0123456789"
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_plain(file, 9)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="the trace cannot be read: it is not UTF-8 text"):
        read_text(file, 9, "the trace")
    with open_plain(tmp_path / "new", "ab") as stream:
        stream.write(b"x")
    assert (tmp_path / "new").read_bytes() == b"x"


@pytest.mark.parametrize(
    "read",
    [
        lambda pipe: read_tenants(pipe, needs_keys=True),
        lambda pipe: load_settings({}, {}, str(pipe)),
        lambda pipe: tls_context(ServerOptions(ssl_certfile=str(pipe))),
        lambda pipe: tls_context(ServerOptions(ssl_certfile=__file__, ssl_keyfile=str(pipe))),
        lambda pipe: open_checkpoint(None, weights=False, options=Options(chat_template=str(pipe))),
        read_trace,
        read_calibration,
        lambda pipe: check_markers(str(pipe), "saccade eval"),
        lambda pipe: batch_lines(pipe, line_helper()).__enter__(),
        lambda pipe: load_image(pipe, MediaPolicy.of(Options())),
        lambda pipe: check_writable("--json", pipe),
    ],
)
def test_no_option_waits_at_a_pipe(read: Callable[[Path], Any], pipe: Path) -> None:
    with pytest.raises((ConfigError, RequestError), match=r"pipe"):
        read(pipe)


@pytest.mark.parametrize("is_macos", [False, True])
def test_without_place_on_the_disk_the_old_file_stays_and_a_new_one_does_not(
    is_macos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_macos:
        monkeypatch.delattr(os, "posix_fallocate")
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("what was there")
    old.chmod(0o640)
    with full_disk(100):
        for path in (old, new):
            with pytest.raises(ConfigError, match=f"{path.name} cannot be written: File too large"):
                write_whole(path, "x" * 101)
        assert old.read_text() == "what was there" and not new.exists()
        for text in ("y" * 100, "short", ""):
            write_whole(old, text)
            assert old.read_text() == text
    assert old.stat().st_mode & 0o777 == 0o640


def test_results_may_go_to_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    write_whole(f"/dev/fd/{write}", "results")
    os.close(write)
    with os.fdopen(read) as stream:
        assert stream.read() == "results"


def test_a_command_whose_results_find_no_place_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_disk(10):
        assert main(["plan", "Qwen/Qwen2-VL-2B-Instruct", "--plot", str(tmp_path / "plan.svg")]) == 2
    assert capsys.readouterr().err == f"saccade: {tmp_path}/plan.svg cannot be written: File too large\n"
    assert not list(tmp_path.iterdir())
