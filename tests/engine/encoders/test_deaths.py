"""An engine's encoder stage and encoder workers over real sockets: slow ones, and images that workers die of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from saccade.engine.encoders.messages import Begun, Encode, encode_in
from saccade.engine.encoders.socket_channel import SocketChannel
from saccade.engine.ipc.messages import frame, read_body
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.remote_encoders import RemoteEncoders
from saccade.types.media import Geometry
from tests.helpers.fakes.fake_channel import FORM
from tests.helpers.fakes.fake_tower import FakeTower, picture
from tests.helpers.servers.encoder_workers import Puppet, Worker

POISON = b"poison"


class Mortal(Puppet):
    """Dies of one image, as often as it is started: it closes its connection half-way. Encodes no other."""

    def __init__(self, address: Path) -> None:
        super().__init__(address)
        self.deaths = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self.accept()
            except OSError:
                return
            with self.connection, self.connection.makefile("rb") as stream:
                while self._survives(stream):
                    pass

    def _survives(self, stream) -> bool:  # type: ignore[no-untyped-def]
        body = read_body(stream)
        asked: Encode | None = encode_in(body) if body is not None else None
        if asked is None:
            return False
        self.connection.sendall(frame(Begun(asked.job)))
        self.deaths += asked.item.key == POISON
        return asked.item.key != POISON


@pytest.fixture
def cleanup() -> Iterator[list[Callable[[], None]]]:
    calls: list[Callable[[], None]] = []
    yield calls
    for call in reversed(calls):
        call()


def stage_of(cleanup: list[Callable[[], None]], *addresses: str) -> LocalEncoder:
    remote = RemoteEncoders(addresses, SocketChannel, FORM, 4096)
    with remote._changed:
        assert remote._changed.wait_for(lambda: len(remote._workers) == len(addresses), 20)
    stage = LocalEncoder(FakeTower(), 32, 2, remote=remote)  # type: ignore[arg-type]
    cleanup.append(stage.close)
    return stage


def test_two_deaths_over_sockets_quarantine_an_image(cleanup: list[Callable[[], None]], tmp_path: Path) -> None:
    mortals = [Mortal(tmp_path / name) for name in ("a", "b")]
    cleanup.extend(mortal.close for mortal in mortals)
    stage = stage_of(cleanup, *[mortal.address for mortal in mortals])
    for _ in range(2):
        stage.submit([picture("poison")])
        stage.advance(None)
        assert "2 encoder workers ended" in str(stage.poll().errors[POISON])
    assert sum(mortal.deaths for mortal in mortals) == 2
    assert stage.remote is not None and stage.remote.counters.refused == 2 and not stage.counters.encoded


def test_a_slow_worker_is_not_waited_for_and_its_place_comes_back(
    cleanup: list[Callable[[], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tmp_path / "slow", seconds_per_patch=0.0)
    cleanup.append(worker.close)
    goes_on = threading.Event()

    def prepare(image: Any, geometry: Geometry) -> Tensor:
        assert goes_on.wait(120)
        return worker.tower.prepare(image, geometry)

    worker.core.encoder._to_patches = prepare
    monkeypatch.setattr(RemoteEncoders, "min_seconds", 0.05)
    stage = stage_of(cleanup, worker.address)
    stage.submit([picture("a", value=7)])
    stage.advance(None)
    assert stage.poll().embeddings[b"a"][0, 0] == 7.0
    assert stage.remote is not None and stage.remote.counters.late == stage.remote.counters.fallbacks == 1
    (held,) = stage.remote._workers.values()
    assert isinstance(held.channel, SocketChannel) and held.channel.space.used == 64
    goes_on.set()
    with held.channel._changed:
        assert held.channel._changed.wait_for(lambda: held.channel.space.used == 0, 20)  # type: ignore[attr-defined]
    held.channel.check()
