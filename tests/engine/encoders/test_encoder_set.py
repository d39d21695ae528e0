"""The front door's encoder workers: a private folder, and clear refusals. tests/server has some that run."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from saccade.engine import autoscale
from saccade.engine.encoders.encoder_set import EncoderSet
from saccade.engine.ipc import worker_places
from saccade.engine.ipc.process import EngineProcess
from saccade.errors import ConfigError, EngineUnavailable
from saccade.options.engine import Options
from saccade.options.server import ServerOptions
from tests.helpers.fakes.fake_worker import NO_FILES, run_bounded, until


def make(count: int, **how: object) -> EncoderSet:
    how = {"bounds": (count, count), **how}
    return EncoderSet(Options(), count, 1, checkpoint=NO_FILES, largest=None, **how)  # type: ignore[arg-type]


def test_without_encoders_there_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    encoders = make(0)
    assert asyncio.run(encoders.start()) == () and encoders.addresses == () and encoders.views() == []
    asyncio.run(encoders.stop())
    assert not list(tmp_path.iterdir())


def test_sockets_lie_in_a_folder_of_this_user_that_goes_with_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = tmp_path_factory.mktemp("s")  # paths of sockets may not be long
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    encoders = make(2)
    (folder,) = short.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert encoders.addresses == (f"{folder}/encoder-0", f"{folder}/encoder-1")
    assert [view.status.state for view in encoders.views()] == ["starting"] * 2
    asyncio.run(encoders.stop())
    assert not folder.exists()


def test_a_worker_that_cannot_start_is_named() -> None:
    async def launch() -> None:
        raise OSError(2, "no such program")

    async def body() -> None:
        encoders = make(1, launch=launch)
        with pytest.raises(EngineUnavailable, match=r"encoder 0 did not start.*no such program"):
            await encoders.start()
        await encoders.stop()

    asyncio.run(body())


def test_a_path_too_long_for_a_socket_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        make(1)
    assert not list(long.iterdir())


def test_systems_without_this_kind_of_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="leave out --encoders"):
        make(1)


def states(encoders: EncoderSet) -> list[str]:
    return [view.status.state for view in encoders.views()]


@pytest.mark.parametrize(("high", "expected"), [(-1, ["ready"] * 3), (10, ["ready", "stopped", "stopped"])])
def test_the_number_of_workers_follows_the_load(
    monkeypatch: pytest.MonkeyPatch, high: int, expected: list[str]
) -> None:
    monkeypatch.setattr(worker_places, "AUTOSCALE_SECONDS", 0.02)
    monkeypatch.setattr(autoscale, "HIGH_WORK", high)  # below 0: any load is high
    monkeypatch.setattr(autoscale, "SHRINK_AFTER", 3)
    command = (sys.executable, "-m", "tests.helpers.fakes.fake_worker", "0.0")

    async def body() -> None:
        encoders = make(2, bounds=(1, 3), launch=partial(EngineProcess.spawn, command))
        try:
            assert len(encoders.addresses) == 3 and states(encoders)[2] == "stopped"
            await encoders.start()
            await until(lambda: states(encoders) == expected)
        finally:
            await encoders.stop()

    run_bounded(body())


@pytest.mark.parametrize(
    "given",
    [{"min_encoders": 0}, {"min_encoders": 3}, {"max_encoders": 1}, {"encoders": 0, "max_encoders": 2}],
    ids=str,
)
def test_limits_must_not_fall(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must not fall, and be from 1 to 64"):
        ServerOptions(**{"encoders": 2, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"encoders": -1}, {"encoders": 65}], ids=str)
def test_a_number_that_cannot_be_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="encoders must be a whole number from 0 to 64"):
        ServerOptions(**given)  # type: ignore[arg-type]
