"""Images that encoder workers encode for the encoder stage, and what happens when they do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from saccade.errors import RequestError
from saccade.runner.embedding_tiers.host import HostTier
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers
from saccade.runner.encoder import remote_encoders
from saccade.runner.encoder.encoder_channel import EncoderLate, RemoteEmbedding
from saccade.types.media import PIXELS_PER_SECOND, MediaItem
from saccade.types.step import MediaTimes
from tests.helpers.engine.tiers import CPU, FREE, SLOW
from tests.helpers.fakes.fake_channel import FORM, WORKER_VALUE, FakeChannel, Workers, embedding
from tests.helpers.fakes.fake_tower import picture


@pytest.fixture
def opened() -> Iterator[list[Workers]]:
    workers: list[Workers] = []
    yield workers
    for one in workers:
        one.stage.close()


def dying(*keys: bytes, was_begun: bool = True) -> FakeChannel:
    """Dies of these images."""
    channel = FakeChannel()

    def respond(item: MediaItem) -> RemoteEmbedding:
        if item.key in keys:
            channel.die(was_begun=was_begun)
        return embedding(item)

    channel.respond = respond
    return channel


def start(opened: list[Workers], *channels: FakeChannel, **how: object) -> Workers:
    opened.append(Workers(*channels, **how))  # type: ignore[arg-type]
    return opened[-1]


def test_a_worker_encodes_and_the_engines_tower_does_not_run(opened: list[Workers]) -> None:
    workers = start(opened, FakeChannel())
    done = workers.encode(picture("a"), picture("b"))
    assert torch.equal(done.embeddings[b"a"], torch.full((4, 1), WORKER_VALUE))
    assert done.times[b"b"] == MediaTimes(1.0, 2.0) and not done.restored
    assert workers.tower.passes == [] and workers.stage.counters.encoded == 2
    assert workers.remote.stats()["encoded"] == 2 and workers.remote.stats()["open"] == 0


def test_its_client_is_charged_for_what_a_worker_decodes(opened: list[Workers]) -> None:
    channel = FakeChannel(lambda item: embedding(item)._replace(times=MediaTimes(5_000.0, 2.0)))
    stage = start(opened, channel).stage
    stage.submit([picture("a")])
    stage.advance(None)
    stage._stage._learn()
    assert stage._stage._turns._used[""] >= 5 * PIXELS_PER_SECOND


def test_an_image_that_no_request_wants_any_more_is_not_decoded_after_a_worker(opened: list[Workers]) -> None:
    is_late = threading.Event()

    def respond(item: MediaItem) -> NoReturn:
        assert is_late.wait(60)
        raise EncoderLate

    workers = start(opened, FakeChannel(respond))
    workers.stage.prefetch([picture("a")])
    begun = workers.stage._stage._begun[b"a"]
    while not begun.future.running():
        pass
    workers.stage.end([b"a"])
    is_late.set()
    with pytest.raises(RequestError, match="no request waits"):
        begun.future.result(60)
    assert workers.tower.peak == 0 and b"a" not in workers.stage._stage


def test_images_are_shared_between_the_workers(opened: list[Workers]) -> None:
    both = threading.Barrier(2, timeout=120)

    def respond(item: MediaItem) -> RemoteEmbedding:
        both.wait()  # passes only when each has one
        return embedding(item)

    workers = start(opened, FakeChannel(respond), FakeChannel(respond))
    workers.encode(picture("a"), picture("b"))
    assert sorted(len(channel.sent) for channel in workers.channels) == [1, 1]


def test_an_embedding_goes_to_the_tiers_and_is_not_sent_again(opened: list[Workers]) -> None:
    tiers = EmbeddingTiers(HostTier(1 << 16, CPU, page_bytes=64), None, FORM)
    tiers.open(SLOW, FREE)
    workers = start(opened, FakeChannel(), tiers=tiers)
    workers.encode(picture("a"))
    done = workers.encode(picture("a"))
    assert workers.channels[0].sent == [b"a"] and done.restored == {b"a"}
    assert done.embeddings[b"a"][0, 0] == WORKER_VALUE


def test_a_lost_image_goes_to_another_worker(opened: list[Workers]) -> None:
    first = dying(b"a")
    workers = start(opened, first, FakeChannel())
    first.seconds_per_patch = 0.0
    workers.remote._workers["0"].seconds_per_patch = 0.0
    done = workers.encode(picture("a"))
    assert done.embeddings[b"a"][0, 0] == WORKER_VALUE and not done.errors
    assert workers.remote.counters.lost == 1 and workers.remote.counters.fallbacks == 0


def test_a_lost_image_is_encoded_in_the_engine_where_no_other_worker_is_left(opened: list[Workers]) -> None:
    workers = start(opened, dying(b"a"))
    done = workers.encode(picture("a", value=7))
    assert torch.equal(done.embeddings[b"a"], torch.full((4, 1), 7.0))
    assert workers.remote.counters.fallbacks == 1 and workers.stage.local_work is None


def test_an_image_that_two_workers_died_of_is_refused_and_no_other(opened: list[Workers]) -> None:
    workers = start(opened, dying(b"bad"), dying(b"bad"), FakeChannel())
    for name in ("0", "1"):
        workers.remote._workers[name].seconds_per_patch = 0.0  # these come first
    done = workers.encode(picture("bad"), picture("good"))
    assert done.errors.keys() == {b"bad"} and done.embeddings.keys() == {b"good"}
    assert "2 encoder workers ended" in str(done.errors[b"bad"]) and done.errors[b"bad"].code == "invalid_image"
    again = workers.encode(picture("bad"))
    assert again.errors.keys() == {b"bad"} and b"bad" not in workers.channels[2].sent
    assert workers.tower.passes == [] and workers.remote.counters.quarantined == 1


def test_a_worker_that_dies_before_it_begins_blames_no_image(opened: list[Workers]) -> None:
    workers = start(opened, dying(b"a", was_begun=False), dying(b"a", was_begun=False))
    done = workers.encode(picture("a"))
    assert done.embeddings.keys() == {b"a"} and not workers.remote._suspects


def test_an_image_that_was_in_a_dying_worker_goes_to_the_next_one_alone(opened: list[Workers]) -> None:
    """Or a second death would blame the wrong one."""
    first = dying(b"bad")
    second = FakeChannel()
    workers = start(opened, first, second)
    workers.remote._workers["0"].seconds_per_patch = 0.0
    workers.encode(picture("bad"), *[picture(str(n)) for n in range(6)])
    at = second.sent.index(b"bad")
    assert second.together[at] == set() and not any(b"bad" in others for others in second.together)


def test_the_list_of_suspects_is_bounded(opened: list[Workers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_encoders, "_MAX_SUSPECTS", 1)
    workers = start(opened, dying(b"a"))
    workers.remote._suspects.update({b"x": 2})
    workers.encode(picture("a"))
    assert dict(workers.remote._suspects) == {b"a": 1}


def test_an_image_that_is_late_is_encoded_in_the_engine_and_the_worker_rests(opened: list[Workers]) -> None:
    now = [100.0]
    slow = FakeChannel()

    def respond(item: MediaItem) -> NoReturn:
        raise EncoderLate("slow")

    slow.respond = respond
    workers = start(opened, slow, clock=lambda: now[0])
    assert workers.encode(picture("a", value=7)).embeddings[b"a"][0, 0] == 7.0
    slow.respond = embedding
    assert workers.encode(picture("b", value=7)).embeddings[b"b"][0, 0] == 7.0 and slow.sent == [b"a"]
    now[0] += 60
    assert workers.encode(picture("c")).embeddings[b"c"][0, 0] == WORKER_VALUE
    assert workers.remote.counters.late == 1 and workers.remote.counters.fallbacks == 2


def test_the_time_allowed_grows_with_the_patches_and_what_was_measured(opened: list[Workers]) -> None:
    channel = FakeChannel()
    workers = start(opened, channel)
    workers.encode(picture("small", 4))
    workers.encode(picture("large", 64))
    least = workers.remote.min_seconds
    assert channel.seconds[0] == pytest.approx(least + 4 * 16 * 0.001)
    learned = workers.remote._workers["0"].seconds_per_patch
    assert learned < 0.001 and least < channel.seconds[1] < least + 4 * 4096 * 0.001


@pytest.mark.parametrize("wrong", [{"slots": 5}, {"slots": 3}, {"dtype": torch.float64}])
def test_an_embedding_of_another_form_is_encoded_in_the_engine(opened: list[Workers], wrong: dict[str, int]) -> None:
    workers = start(opened, FakeChannel(lambda item: embedding(item, **wrong)))  # type: ignore[arg-type]
    assert workers.encode(picture("a", value=7)).embeddings[b"a"].tolist() == [[7.0]] * 4
    assert workers.remote.counters.wrong == 1


def test_an_image_that_cannot_be_decoded_fails_once(opened: list[Workers]) -> None:
    def respond(item: MediaItem) -> NoReturn:
        raise RequestError("no picture", code="invalid_image")

    workers = start(opened, FakeChannel(respond))
    assert str(workers.encode(picture("a")).errors[b"a"]) == "no picture"
    assert workers.tower.passes == [] and workers.channels[0].sent == [b"a"]


def test_without_device_memory_for_it_an_embedding_is_made_in_the_engine(opened: list[Workers]) -> None:
    def place(parts: object, size: int) -> NoReturn:
        raise torch.OutOfMemoryError("none left")

    workers = start(opened, FakeChannel())
    workers.stage.place = place
    assert workers.encode(picture("a", value=7)).embeddings[b"a"][0, 0] == 7.0
    assert workers.remote.counters.fallbacks == 1 and workers.remote.stats()["open"] == 0


def test_frame_groups_of_videos_stay_in_the_engine(opened: list[Workers]) -> None:
    workers = start(opened, FakeChannel())
    workers.encode(replace(picture("a"), kind="video"))
    assert workers.channels[0].sent == [] and workers.tower.passes == [[16]]


def test_a_slice_does_not_wait_for_a_worker_and_counts_only_what_the_engine_encodes(opened: list[Workers]) -> None:
    hold = threading.Event()

    def respond(item: MediaItem) -> RemoteEmbedding:
        assert hold.wait(120)
        return embedding(item)

    workers = start(opened, FakeChannel(respond))
    stage = workers.stage
    stage.submit([picture("far"), replace(picture("near"), kind="video")])
    while b"near" not in stage.poll().embeddings:
        stage.advance(1)
        assert stage.local_work in (0, 4)
    assert stage.local_work == 0 and workers.tower.passes == [[16]]
    hold.set()
    stage.advance(None)
    assert stage.poll().embeddings.keys() == {b"far"}


def test_without_a_worker_all_work_is_the_engines(opened: list[Workers]) -> None:
    workers = start(opened, FakeChannel())
    assert workers.stage.local_work == 0
    workers.channels[0].close()
    assert workers.stage.local_work is None
    assert workers.encode(picture("a", value=7)).embeddings[b"a"][0, 0] == 7.0


def test_closing_gives_up_what_is_under_way(opened: list[Workers]) -> None:
    came = threading.Event()
    channel = FakeChannel()

    def respond(item: MediaItem) -> NoReturn:
        came.set()
        while channel.is_open:
            threading.Event().wait(0.001)
        channel.die()

    channel.respond = respond
    workers = start(opened, channel)
    workers.stage.submit([picture("a")])
    assert came.wait(120)
    workers.stage.close()
    assert workers.tower.passes == [] and not workers.remote._suspects
