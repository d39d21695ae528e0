"""SIGHUP: what cannot be read changes nothing, and holds up neither the next reload nor the end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from saccade.options.server import ServerOptions
from saccade.server import reload
from saccade.server.http.auth import Tenants
from saccade.server.reload import Reloader
from tests.helpers.servers.serving import running_server, until

ACME = '[acme]\nkeys = ["acme-1"]\noperator = true\n'


def test_a_pipe_in_the_place_of_the_file_changes_nothing_and_holds_up_nothing(
    qwen2_vl_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(ACME)
    with running_server(qwen2_vl_folder, "--api-keys", str(file), key="acme-1") as server:
        file.unlink()
        os.mkfifo(file)
        server.process.send_signal(signal.SIGHUP)
        assert until(lambda: any("all tenants stay as they were" in line for line in server.log)), server.log
        assert server.get("/v1/models").status_code == 200
        file.unlink()
        file.write_text(f'{ACME}[globex]\nkeys = ["globex-1"]\n')
        server.process.send_signal(signal.SIGHUP)
        assert until(lambda: any("was read again: 2 tenants" in line for line in server.log)), server.log
        os.rename(file, tmp_path / "old")
        os.mkfifo(file)
        server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.process.poll() is not None) and server.process.returncode == 0


def test_a_disk_that_does_not_answer_holds_up_a_reload_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "_SECONDS", 0.05)
    file = tmp_path / "tenants.toml"
    file.write_text(ACME)
    server = ServerOptions(api_keys=str(file))
    tenants = Tenants(server)
    answers = threading.Event()
    read = tenants.read

    def slow() -> object:
        answers.wait()
        return read()

    monkeypatch.setattr(tenants, "read", slow)

    async def run() -> None:
        reloader = Reloader(server, tenants, None)
        reloader.begin()
        while "not read within" not in caplog.text:
            await asyncio.sleep(0.01)
        assert all(thread.daemon for thread in threading.enumerate() if "reload" in thread.name)
        file.write_text(f'{ACME}[globex]\nkeys = ["globex-1"]\n')
        answers.set()
        reloader.begin()
        while len(tenants) != 2:
            await asyncio.sleep(0.01)
        reloader.close()

    asyncio.run(asyncio.wait_for(run(), 30))
