"""An encoder worker's queue: engines take turns, an image that two of them want is encoded once."""

from __future__ import annotations

import pytest

from saccade.engine.encoders import encoder_core
from saccade.engine.encoders.encoder_core import EncoderCore, EncoderJob, EncoderOutcome
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.types.media import MediaItem
from tests.helpers.fakes.fake_tower import FakeTower, picture


class Served:
    """A core over the fake tower, and what it said."""

    def __init__(self, max_patches: int = 16) -> None:
        self.tower = FakeTower()
        self.core = EncoderCore(LocalEncoder(self.tower, max_patches, 1), 0.001)  # type: ignore[arg-type]
        self.begun: list[tuple[str, bytes]] = []
        self.done: list[tuple[str, bytes]] = []
        self.outcomes: list[EncoderOutcome] = []

    def submit(self, engine: str, *items: MediaItem) -> None:
        for item in items:
            self.core.submit(EncoderJob(engine, item, self._begin(engine, item), self._done(engine, item)))

    def _begin(self, engine: str, item: MediaItem):  # type: ignore[no-untyped-def]
        return lambda: self.begun.append((engine, item.key))

    def _done(self, engine: str, item: MediaItem):  # type: ignore[no-untyped-def]
        def done(outcome: EncoderOutcome) -> None:
            self.done.append((engine, item.key))
            self.outcomes.append(outcome)

        return done

    def run(self, count: int) -> None:
        while len(self.done) < count:
            self.core.step()


@pytest.fixture
def served() -> Served:
    return Served()


def test_engines_take_turns_however_many_images_one_sends(served: Served) -> None:
    served.submit("a", *[picture(f"a{n}") for n in range(6)])
    served.submit("b", picture("b0"), picture("b1"))
    served.run(8)
    assert [engine for engine, _ in served.begun] == ["a", "b", "a", "b", "a", "a", "a", "a"]
    stats = served.core.stats()
    assert (stats["queue"], stats["patches"], stats["encoded"]) == (0, 0, 8)
    served.core.close()


def test_an_image_that_two_engines_want_is_encoded_once(served: Served) -> None:
    served.submit("a", picture("same"))
    served.submit("b", picture("same"))
    served.run(2)
    assert served.tower.passes == [[16]] and {engine for engine, _ in served.done} == {"a", "b"}
    assert served.outcomes[0].embedding is served.outcomes[1].embedding
    served.core.close()


def test_no_more_than_two_passes_are_begun(served: Served) -> None:
    served.submit("a", *[picture(str(n)) for n in range(5)])
    served.core._admit()
    assert len(served.begun) == 2
    served.run(5)
    served.core.close()


def test_images_of_an_engine_that_is_gone_are_dropped(served: Served) -> None:
    served.submit("gone", *[picture(str(n)) for n in range(5)])
    served.submit("here", picture("x"))
    served.core.forget("gone")
    served.run(1)
    assert served.done == [("here", b"x")] and served.core.stats()["queue"] == 0
    served.core.close()


def test_an_image_that_is_none_is_told_of(served: Served) -> None:
    served.submit("a", picture("bad", data=b"no picture"), picture("good"))
    served.run(2)
    outcomes = dict(zip((key for _, key in served.done), served.outcomes, strict=True))
    assert outcomes[b"bad"].error is not None and outcomes[b"good"].embedding is not None
    served.core.close()


def test_images_that_wait_count_as_patches_and_waiting_as_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_core, "_IDLE_SECONDS", 0.0)
    times = iter([0.0, 1.0, 4.0, 5.0, 9.0])  # built; from 1 to 4 idle; stats at 5 and 9
    core = EncoderCore(LocalEncoder(FakeTower(), 16, 1), 0.001, clock=lambda: next(times))  # type: ignore[arg-type]
    core.step()
    assert core.stats()["use"] == pytest.approx(0.4)
    core.submit(EncoderJob("a", picture("x"), lambda: None, lambda outcome: None))
    assert core.stats() == {"queue": 1, "patches": 16, "use": 1.0, "encoded": 0}
    core.close()
