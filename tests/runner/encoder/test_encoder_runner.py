"""The encoder stage with a tower of four layers made of additions."""

from __future__ import annotations

import gc
import io
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.media.decode import decode
from saccade.media.jpeg_stream import StreamedJpeg
from saccade.media.media_workers import Ticket
from saccade.models.vision.backend import TorchVision
from saccade.models.vision.preprocess import ImagePixels, resize
from saccade.runner.embedding_tiers.entry import Restored
from saccade.runner.encoder import decode_stage, encoder_runner
from saccade.runner.encoder.encoder_pass import EncoderPass, Prepared
from saccade.runner.encoder.encoder_runner import EncoderResults, LocalEncoder
from saccade.runner.encoder.timing import Times
from saccade.runner.runner import Runner
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from saccade.types.step import MediaTimes, StepPlan
from tests.helpers.fakes.fake_tower import FakeTower, picture
from tests.helpers.media.images import make_photo


class UnreadWatch:
    was_read = False

    def lap(self) -> AbstractContextManager[None]:
        return nullcontext()

    def ms(self) -> float:
        self.was_read = True
        return 8.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has nothing else to do waits for a decoded image however busy the machine is."""
    monkeypatch.setattr(encoder_runner, "_IDLE_WAIT", 60.0)


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


def stage(tower: FakeTower, max_patches: int = 32) -> LocalEncoder:
    return LocalEncoder(tower, max_patches, threads=2)  # type: ignore[arg-type]


def test_images_of_different_requests_share_a_pass_up_to_the_patch_budget(tower: FakeTower) -> None:
    encoder = stage(tower, max_patches=32)
    encoder.submit([picture(str(i)) for i in range(5)])  # 16 patches each
    encoder.advance(None)
    assert tower.passes == [[16, 16], [16, 16], [16]]
    assert len(encoder.poll().embeddings) == 5


def test_a_large_jpeg_is_decoded_while_the_model_resizes_it(tower: FakeTower, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size(40, 30)
    data = io.BytesIO()
    make_photo(1400, 1000).save(data, "JPEG")
    item = replace(
        picture("photo", data=data.getvalue()),
        header=Header("jpeg", Size(1400, 1000), 1, 1, "RGB"),
        geometry=Geometry(size, Grid(1, 4, 4), 4, 4),
    )
    prepared: list[Tensor] = []

    def prepare(image: ImagePixels, geometry: Geometry) -> Tensor:
        assert isinstance(image, StreamedJpeg)
        prepared.append(TorchVision().resize(image, geometry.resized, 3))
        return torch.zeros(geometry.grid.patches, 1)

    monkeypatch.setattr(tower, "prepare", prepare)
    encoder = stage(tower)
    encoder.submit([item])
    encoder.advance(None)
    assert not encoder.poll().errors
    assert np.array_equal(prepared[0].numpy(), resize(decode(item), size))


def test_a_image_larger_than_the_budget_gets_a_pass_of_its_own(tower: FakeTower) -> None:
    encoder = stage(tower, max_patches=8)
    encoder.submit([picture("small", 2), picture("large", 8), picture("other", 2)])
    encoder.advance(None)
    assert tower.passes == [[4], [64], [4]]


@pytest.mark.parametrize(("asked", "ran"), [(1, 2), (2, 2), (3, 2), (4, 4)])
def test_a_slice_meets_its_limit_as_closely_as_layers_that_run_together_allow(
    tower: FakeTower, asked: int, ran: int
) -> None:
    tower.together = 2
    encoder = stage(tower)
    encoder.submit([picture("a")])
    encoder.advance(asked)
    assert tower.ran == ran


def test_a_pass_advances_by_as_many_layers_as_it_is_given(tower: FakeTower) -> None:
    encoder = stage(tower)
    encoder.submit([picture("a")])
    encoder.advance(2)
    assert not encoder.poll().embeddings
    encoder.advance(2)
    assert not encoder.poll().embeddings
    encoder.advance(1)  # the projection behind the last layer
    assert list(encoder.poll().embeddings) == [b"a"]
    assert encoder.is_idle


def test_slices_and_one_go_give_the_same_embeddings(tower: FakeTower) -> None:
    whole, sliced = stage(tower), stage(tower)
    items = [picture(str(i), value=10 * i) for i in range(3)]
    whole.submit(items)
    whole.advance(None)
    sliced.submit(items)
    while not sliced.is_idle:
        sliced.advance(1)
    expected, found = whole.poll().embeddings, sliced.poll().embeddings
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_broken_image_fails_alone_with_a_reason_free_of_library_text(tower: FakeTower) -> None:
    encoder = stage(tower)
    encoder.submit([picture("good"), picture("bad", data=b"\x89PNG\r\n\x1a\n broken"), picture("fine")])
    encoder.advance(None)
    done = encoder.poll()
    assert set(done.embeddings) == {b"good", b"fine"}
    assert done.errors[b"bad"].code == "image_parse_error"
    assert "4x4" in str(done.errors[b"bad"]) and "0x" not in str(done.errors[b"bad"])


def test_running_out_of_memory_ends_one_image_not_its_neighbours(tower: FakeTower) -> None:
    tower.break_on = {64}
    encoder = stage(tower, max_patches=200)
    encoder.submit([picture("a"), picture("huge", 8), picture("b")])
    encoder.advance(None)
    done = encoder.poll()
    assert set(done.embeddings) == {b"a", b"b"}
    assert set(done.errors) == {b"huge"}
    assert "8x8" in str(done.errors[b"huge"])


def test_a_image_that_cannot_be_prepared_fails_alone(tower: FakeTower, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = tower.prepare

    def short_of_memory(image: np.ndarray, geometry: Geometry) -> Tensor:
        if geometry.grid.patches == 64:
            raise MemoryError
        return prepare(image, geometry)

    monkeypatch.setattr(tower, "prepare", short_of_memory)
    encoder = stage(tower, max_patches=200)
    encoder.submit([picture("a"), picture("huge", 8), picture("b")])
    encoder.advance(None)
    done = encoder.poll()
    assert set(done.embeddings) == {b"a", b"b"}
    assert "8x8" in str(done.errors[b"huge"])


def test_memory_is_set_by_the_budget_and_not_by_the_number_of_images() -> None:
    peaks = []
    for count in (8, 64):
        tower = FakeTower()
        encoder = stage(tower, max_patches=32)
        encoder.submit([picture(str(i)) for i in range(count)])
        encoder.advance(None)
        assert len(encoder.poll().embeddings) == count
        peaks.append(tower.peak)
    assert max(peaks) <= 3 * 32  # two passes decoded ahead and the one under way
    assert encoder.counters.peak_patches <= 3 * 32


def test_a_submitted_image_is_decoded_before_those_that_are_expected_later(tower: FakeTower) -> None:
    encoder = stage(tower, max_patches=16)
    encoder.prefetch_media([picture("a"), picture("b")])  # 32 patches: there is room for no more
    encoder.submit([picture("wanted")])
    for number in range(100):
        encoder.prefetch_media([picture(f"later {number}"), picture(f"last {number}")])
        wait([begun.future for begun in encoder._stage._begun.values()])
        encoder.advance(1, may_wait=False)
        encoder.prefetch([])
    assert list(encoder.poll().embeddings) == [b"wanted"]


def test_a_prefetched_image_is_decoded_once(tower: FakeTower) -> None:
    encoder = stage(tower)
    item = picture("a")
    encoder.prefetch([item])
    encoder.submit([item])
    encoder.advance(None)
    assert encoder.counters.decoded == 1
    assert tower.peak == 16


def test_a_guess_that_was_not_wanted_is_forgotten(tower: FakeTower) -> None:
    encoder = stage(tower)
    encoder.prefetch([picture("guess")])
    encoder._stage._begun[b"guess"].future.result()
    encoder.prefetch([])
    assert b"guess" not in encoder._stage
    assert not encoder.poll().embeddings


def test_times_are_shared_by_patches(tower: FakeTower) -> None:
    encoder = stage(tower, max_patches=100)
    encoder.submit([picture("small", 4), picture("large", 8)])
    encoder.advance(None)
    times = encoder.poll().times
    assert times[b"large"].encode_ms == pytest.approx(4 * times[b"small"].encode_ms)


def test_keys_are_known_before_the_times_are_read(tower: FakeTower) -> None:
    watch = UnreadWatch()
    times = Times()
    times.add(b"a", 1.5, watch, 0.25)
    assert list(times) == [b"a"] and len(times) == 1
    assert not watch.was_read
    assert times[b"a"] == MediaTimes(1.5, 2.0)


def test_the_tower_gets_the_patches_for_itself(tower: FakeTower) -> None:
    """Whoever else kept them would hold their memory until the last layer."""
    seen: list[weakref.ref[Tensor]] = []

    def forgetful(patches: Tensor, grids: Sequence[Grid]) -> Generator[int, None, list[Tensor]]:
        seen.append(weakref.ref(patches))
        del patches
        yield 1
        assert seen[0]() is None
        return [torch.zeros(4, 1)]

    tower.encode = forgetful  # type: ignore[method-assign]
    encoder = stage(tower)
    encoder.submit([picture("a")])
    encoder.advance(None)
    assert list(encoder.poll().embeddings) == [b"a"]


def test_a_failed_pass_is_forgotten_before_its_images_try_again(tower: FakeTower) -> None:
    held: list[weakref.ref[Tensor]] = []
    encode = tower.encode

    def heavy(patches: Tensor, grids: Sequence[Grid]) -> Generator[int, None, list[Tensor]]:
        assert not any(reference() is not None for reference in held)
        if len(grids) > 1:
            activations = torch.zeros(100)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("out of memory")
        return (yield from encode(patches, grids))

    tower.encode = heavy  # type: ignore[method-assign]
    encoder = stage(tower, max_patches=100)
    encoder.submit([picture("a"), picture("b")])
    encoder.advance(None)
    assert set(encoder.poll().embeddings) == {b"a", b"b"}
    assert len(held) == 1


def test_a_slice_does_not_wait_for_a_image_that_is_still_being_decoded(tower: FakeTower) -> None:
    gate = threading.Event()
    prepare = tower.prepare

    def slow(image: np.ndarray, geometry: Geometry) -> Tensor:
        if geometry.grid.patches == 64:
            assert gate.wait(120)
        return prepare(image, geometry)

    tower.prepare = slow  # type: ignore[method-assign]
    encoder = stage(tower, max_patches=100)
    encoder.submit([picture("slow", 8), picture("quick")])
    while b"quick" not in encoder.poll().embeddings:  # passes the slow one
        encoder.advance(1, may_wait=False)
    assert not encoder.is_idle
    gate.set()
    encoder.advance(None)
    assert list(encoder.poll().embeddings) == [b"slow"]


def test_memory_of_decoders_is_given_back_when_no_thread_copies_from_it(
    tower: FakeTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = stage(tower)
    begun = threading.Event()
    order: list[str] = []

    @contextmanager
    def pixels(item: MediaItem, ticket: Ticket, new: object) -> Iterator[np.ndarray]:
        begun.set()
        for _ in range(3_000):
            if ticket.is_cancelled:
                break
            time.sleep(0.01)
        yield np.zeros((4, 4, 3), np.uint8)
        order.append("copied")

    monkeypatch.setattr(encoder._decoder, "pixels", pixels)
    monkeypatch.setattr(encoder._decoder, "close", lambda: order.append("closed"))
    encoder.prefetch([picture("a")])
    assert begun.wait(60)
    encoder.close()
    assert order == ["copied", "closed"]


def owned(owner: str, *names: str) -> list[MediaItem]:
    return [replace(picture(name), owner=owner) for name in names]


def served(encoder: LocalEncoder, gate: threading.Event) -> list[str]:
    """Names of images, as they come to a decode thread. The first waits there for the gate."""
    order: list[str] = []
    prepare = encoder._prepare

    def noting(item: MediaItem, ticket: Ticket) -> Prepared | Restored:
        order.append(item.key.decode())
        assert gate.wait(120)
        return prepare(item, ticket)

    encoder._stage._decode = noting
    return order


def test_an_image_does_not_wait_in_the_threads_for_all_pages_of_another_request(tower: FakeTower) -> None:
    encoder = LocalEncoder(tower, 100, threads=1)  # type: ignore[arg-type]
    gate = threading.Event()
    order = served(encoder, gate)
    encoder.submit(owned("pages", "1", "2", "3", "4"))
    encoder.submit(owned("other", "image"))
    gate.set()
    encoder.advance(None)
    assert order.index("image") <= 2 and len(order) == 5
    encoder.close()


def test_where_few_images_are_decoded_ahead_owners_take_turns_too(tower: FakeTower) -> None:
    encoder = LocalEncoder(tower, 16, threads=1)  # type: ignore[arg-type]
    gate = threading.Event()
    order = served(encoder, gate)
    encoder.submit(owned("pages", "1", "2", "3", "4"))  # there is room for two
    encoder.submit(owned("other", "image"))
    gate.set()
    encoder.advance(None)
    assert order == ["1", "2", "image", "3", "4"]
    encoder.close()


def test_where_passes_run_ahead_the_first_does_not_wait_for_all_its_images(tower: FakeTower) -> None:
    gate = threading.Event()
    prepare, encode = tower.prepare, tower.encode

    def slow(image: np.ndarray, geometry: Geometry) -> Tensor:
        if geometry.grid.patches == 64:
            assert gate.wait(120)
        return prepare(image, geometry)

    def opening(patches: Tensor, grids: Sequence[Grid]) -> Generator[int, None, list[Tensor]]:
        gate.set()  # the slow picture is decoded no sooner than a pass has begun
        return encode(patches, grids)

    tower.prepare, tower.encode = slow, opening  # type: ignore[method-assign]
    encoder = stage(tower, max_patches=100)
    encoder._is_async = True
    encoder.submit([picture("quick"), picture("slow", 8)])
    encoder.advance(None)
    assert encoder.poll().embeddings.keys() == {b"quick", b"slow"}
    assert len(tower.passes) == 2


def test_pixels_decoded_at_the_same_time_are_bounded(tower: FakeTower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_stage, "_MAX_SOURCE_PIXELS", 40)
    encoder = stage(tower, max_patches=1000)
    encoder.submit([picture(str(i)) for i in range(6)])  # 16 pixels each
    assert len([begun for begun in encoder._stage._begun.values() if not begun.future.done()]) <= 2
    encoder.advance(None)
    assert len(encoder.poll().embeddings) == 6


def test_running_out_of_memory_while_packing_ends_no_neighbour(
    tower: FakeTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(parts: list[Tensor]) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "cat", no_room)
    encoder = stage(tower, max_patches=100)
    encoder.submit([picture("a"), picture("b")])
    encoder.advance(None)
    assert set(encoder.poll().embeddings) == {b"a", b"b"}  # one by one


def test_clear_drops_everything_under_way(tower: FakeTower) -> None:
    encoder = stage(tower)
    encoder.submit([picture("a"), picture("b")])
    encoder.advance(1)
    encoder.clear()
    assert encoder.is_idle
    encoder.submit([picture("a")])
    encoder.advance(None)
    assert list(encoder.poll().embeddings) == [b"a"]


def test_a_pass_that_is_dropped_half_way_frees_its_tensors_without_the_garbage_collector(tower: FakeTower) -> None:
    patches = torch.zeros(4, 3)
    watch = weakref.ref(patches)
    image = replace(picture("a"), geometry=Geometry(Size(2, 2), Grid(1, 2, 2), 4, 4))
    half = EncoderPass(tower, [(image, Prepared(patches, None, 0.0))], on_cuda=False)
    del patches
    gc.disable()
    try:
        assert half.run_layers(1) == 1 and not half.is_complete
        del half
        assert watch() is None
    finally:
        gc.enable()


def test_a_rehearsal_resizes_a_image_and_a_group_of_frames_and_leaves_nothing_behind(tower: FakeTower) -> None:
    seen: list[tuple[int, ...]] = []
    tower.prepare = lambda image, geometry: seen.append(image.shape) or torch.zeros(1)  # type: ignore[method-assign, assignment, func-returns-value]
    encoder = stage(tower)
    encoder.warm_up(Geometry(Size(28, 56), Grid(1, 4, 2), 2, 2), frames=2)
    assert seen == [(57, 29, 3), (2, 57, 29, 3)], "neither has the size it is to get"
    assert encoder.is_idle and encoder.counters.decoded == 0 and not encoder.poll().embeddings


def test_images_of_the_next_step_are_decoded_while_the_tower_runs() -> None:
    runner = mock.Mock(embeddings={}, _coordinates={})
    runner.encoder.poll.return_value = EncoderResults.nothing()
    Runner._encode(runner, StepPlan(1, prefetch=(picture("next"),)))
    names = [name for name, _, _ in runner.encoder.method_calls]
    assert names.index("prefetch") < names.index("advance") < names.index("poll")
