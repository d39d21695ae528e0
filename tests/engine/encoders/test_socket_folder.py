"""The folder of the encoders' sockets: what a killed server leaves goes at the next start, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saccade.engine.encoders.socket_folder import SocketFolder

SERVER = """
from pathlib import Path
from saccade.engine.encoders.socket_folder import SocketFolder
folder = SocketFolder()
Path(folder.name, "encoder-0").touch()
print(folder.name, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    short = tmp_path_factory.mktemp("s")  # paths of sockets may not be long
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    monkeypatch.setenv("TMPDIR", str(short))
    return short


@contextmanager
def other_server() -> Iterator[Path]:
    """The folder of a server that is killed at the end. It looks an hour old."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        make_old(folder)
        yield folder
        process.kill()


def make_old(path: Path) -> None:
    os.utime(path, times=(path.stat().st_atime, path.stat().st_mtime - 3600))


def start_and_stop() -> None:
    SocketFolder().close()


def test_the_folder_of_a_killed_server_goes_at_the_next_start() -> None:
    with other_server() as folder:
        pass
    assert (folder / "encoder-0").exists()
    start_and_stop()
    assert not folder.exists()


def test_the_folder_of_a_server_that_lives_stays() -> None:
    with other_server() as folder:
        start_and_stop()
        assert (folder / "encoder-0").exists()


def test_a_folder_that_is_being_made_stays(place: Path) -> None:
    new = place / "saccade-encoders-new"  # not locked yet
    new.mkdir()
    start_and_stop()
    assert new.exists()


def test_nothing_else_is_removed(place: Path) -> None:
    others = [place / "saccade-eval-1", place / "saccade-encoders-file", place / "saccade-encoders-link"]
    others[0].mkdir()
    others[1].touch()
    others[2].symlink_to(others[0])
    for path in others[:2]:
        make_old(path)
    start_and_stop()
    assert set(place.iterdir()) == set(others)
