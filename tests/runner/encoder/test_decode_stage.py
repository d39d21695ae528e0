"""Which image is decoded next, and what does not wait for what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace

import pytest

from saccade.errors import RequestError
from saccade.media.media_workers import Ticket
from saccade.runner.encoder.decode_order import DecodeTurns
from saccade.runner.encoder.decode_stage import DecodeStage
from saccade.types.media import HEAVY_PIXELS, PIXELS_PER_SECOND, Grid, MediaItem, Size
from tests.helpers.fakes.fake_tower import picture


def item(name: str, client: str = "", request: str = "", pixels: int = 16, patches: int = 16) -> MediaItem:
    made = picture(name)
    made = replace(made, geometry=replace(made.geometry, grid=Grid(1, 1, patches)))
    return replace(made, client=client, owner=request, header=replace(made.header, size=Size(pixels, 1)))


def names(items: list[MediaItem]) -> list[str]:
    return [item.key.decode() for item in items]


# --- turns --------------------------------------------------------------------------------------------------------


def test_the_client_for_which_least_was_decoded_goes_first_whenever_it_came() -> None:
    turns = DecodeTurns()
    flood = [item(f"a{i}", "A", f"request {i}", pixels=1_000) for i in range(4)]
    turns.begin(flood[0])
    assert names(turns.order([*flood[1:], item("b0", "B", "x", 400), item("b1", "B", "y", 400)])) == [
        "b0",
        "b1",
        "a1",
        "a2",
        "a3",
    ]


def test_requests_of_a_client_take_turns_and_active_ones_count() -> None:
    pages = [item(str(i), "A", "pages") for i in range(4)]
    other = item("other", "A", "one")
    assert names(DecodeTurns().order([*pages[1:], other], active=pages[:1])) == ["other", "1", "2", "3"]


def test_what_a_decoder_took_counts_in_place_of_the_price() -> None:
    turns = DecodeTurns()
    cheap, dear = item("cheap", "A", pixels=100), item("dear", "B", pixels=1_000)
    turns.begin(cheap)
    turns.begin(dear)
    assert names(turns.order([item("b", "B"), item("a", "A")])) == ["a", "b"]
    turns.end(cheap, 1.0)  # it looked cheap
    turns.end(dear, 500 / PIXELS_PER_SECOND)
    assert names(turns.order([item("a", "A"), item("b", "B")])) == ["b", "a"]


def test_a_client_that_was_away_saves_nothing_up() -> None:
    turns = DecodeTurns()
    for i in range(100):
        turns.begin(item(str(i), "A", pixels=1_000))
    new = [item(f"b{i}", "B", str(i), 1_000) for i in range(10)]
    order = names(turns.order([*new, *(item(f"a{i}", "A", str(i), 1_000) for i in range(10))]))
    assert "a0" in order[:4]


# --- heavy images -------------------------------------------------------------------------------------------------


class Decoders:
    """Decodes an image when it is told to, or is ended."""

    def __init__(self, threads: int = 1) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.stage: DecodeStage[str] = DecodeStage(self._decode, threads, 1, max_patches=1_000)

    def _decode(self, item: MediaItem, ticket: Ticket) -> str:
        name = item.key.decode()
        self.begun.append(name)
        while not self.gates.setdefault(name, threading.Event()).wait(0.01):
            if ticket.is_cancelled:
                self.ended.append(name)
                raise RequestError("ended")
        return name

    def let(self, name: str) -> None:
        self.gates.setdefault(name, threading.Event()).set()

    def wait_for(self, *names: str) -> None:
        wait([self.stage._begun[name.encode()].future for name in names], timeout=60)


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    decoders = Decoders()
    yield decoders
    for name in ("heavy 0", "heavy 1", "heavy 2", "light", "late", "gone", "needed"):
        decoders.let(name)
    decoders.stage.close()


def heavy(number: int, client: str = "A") -> MediaItem:
    return item(f"heavy {number}", client, f"request {number}", HEAVY_PIXELS + 1)


def test_no_light_image_waits_for_heavy_ones_even_with_one_thread(decoders: Decoders) -> None:
    decoders.let("light")
    decoders.stage.start([heavy(0), heavy(1), heavy(2), item("light", "B")])
    decoders.wait_for("light")
    assert decoders.stage.ready(b"light") == "light" and not decoders.stage.decoded_first()


def test_few_heavy_images_are_begun_at_once_and_clients_take_turns(decoders: Decoders) -> None:
    items = [heavy(0), heavy(1), heavy(2), item("late", "B", "x", HEAVY_PIXELS + 1)]
    decoders.stage.start(items[:1])
    decoders.stage.start(items)
    assert b"late" in decoders.stage and b"heavy 1" not in decoders.stage, "it goes before the second of a flood"
    for name in ("heavy 0", "late"):
        decoders.let(name)
    decoders.wait_for("heavy 0", "late")
    assert decoders.stage.decoded_first() == {b"heavy 0", b"late"}


@pytest.mark.parametrize("pixels", [16, HEAVY_PIXELS + 1])
def test_an_image_that_no_request_wants_is_ended_and_its_thread_is_free(decoders: Decoders, pixels: int) -> None:
    decoders.stage.start([item("gone", pixels=pixels)])
    gone = decoders.stage._begun[b"gone"].future
    while not decoders.begun:
        pass
    decoders.stage.end([b"gone", b"never begun"])
    wait([gone], timeout=60)
    assert decoders.ended == ["gone"] and b"gone" not in decoders.stage
    decoders.let("late")
    decoders.stage.start([item("late", pixels=pixels)])
    decoders.wait_for("late")
    assert decoders.stage.ready(b"late") == "late" and not decoders.stage.held_patches - 16


@pytest.mark.parametrize("size", [{"pixels": HEAVY_PIXELS + 1}, {"patches": 500}])
def test_what_is_needed_first_begins_though_others_wait_decoded(decoders: Decoders, size: dict[str, int]) -> None:
    first, second, needed = (item(name, **size) for name in ("first", "second", "needed"))
    for name in ("first", "second"):
        decoders.let(name)
    decoders.stage.start([first, second])
    decoders.wait_for("first", "second")
    decoders.stage.make_room([needed, first, second], submitted={b"first", b"second"})
    decoders.stage.start([needed])
    assert b"needed" not in decoders.stage, "the encoder takes those that are submitted"
    decoders.stage.make_room([needed, second, first], submitted=())
    assert decoders.stage.keys() == {b"needed", b"second"}, "the last gave way, and only that"
    decoders.stage.make_room([first, second], submitted=())
    assert decoders.stage.keys() == {b"needed", b"first"}, "what is being decoded stays"
    decoders.stage.make_room([second], submitted={b"first"})
    assert b"second" not in decoders.stage
    decoders.let("needed")


@pytest.mark.parametrize("is_heavy", [True, False])
def test_an_image_that_is_dropped_before_it_begins_costs_nothing(decoders: Decoders, is_heavy: bool) -> None:
    pixels = HEAVY_PIXELS + 1 if is_heavy else 16
    first, second = (item(name, "A", "x", pixels) for name in ("light", "late"))
    decoders.stage.start([first, second])  # with one thread
    while not decoders.begun:
        pass
    decoders.stage.end([second.key])
    decoders.stage.start([])
    assert second.key not in decoders.stage
    assert decoders.stage._turns._used == {"A": first.price}


def test_a_light_image_that_is_being_decoded_is_not_begun_again(decoders: Decoders) -> None:
    light = item("light", "B")
    decoders.stage.start([light])
    while not decoders.begun:
        pass
    decoders.stage.drop_expected(())
    decoders.stage.start([light])
    decoders.let("light")
    assert decoders.stage.take(light) == "light" and decoders.begun == ["light"]
