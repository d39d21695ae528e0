"""Heavy images: decoded before they take budget or space of the encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from saccade.scheduler.request import ScheduledRequest
from saccade.types.media import HEAVY_PIXELS, Size
from saccade.types.request import Tenant
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.scheduling import FakeImage, FakeRunner, Rig, key_of, make_request, names

A, B = Tenant("A"), Tenant("B")
FLOOD = [f"flood {i}" for i in range(70)]


class DecodingRunner(FakeRunner):
    """Heavy images are decoded when a test says so."""

    decoded: frozenset[bytes] = frozenset()
    wanted: tuple[str, ...] = ()
    unwanted: tuple[bytes, ...] = ()

    def execute(self, plan: StepPlan) -> StepResult:
        self.wanted = tuple(names(plan.decode_first, "one", "two", *FLOOD))
        self.unwanted += plan.unwanted
        assert all(not item.is_decoded_first or item.key in self.decoded for item in plan.encode), "given too early"
        return replace(super().execute(plan), decoded=self.decoded)


def rig(**changes: Any) -> Rig:
    made = Rig(**changes)
    made.runner = DecodingRunner(made.config)
    return made


def add_heavy(rig: Rig, request_id: str, *names: str, **how: Any) -> None:
    request = make_request(request_id, 4, *(FakeImage(name, 8) for name in names), 4, **how)
    size = Size(HEAVY_PIXELS + 1, 1)
    slow = tuple(replace(item, header=replace(item.header, size=size)) for item in request.prompt.items)
    rig.scheduler.add(replace(request, prompt=replace(request.prompt, items=slow)), rig.now)


@pytest.mark.parametrize("sliced", [None, 1])
def test_a_flood_of_heavy_images_keeps_no_budget_from_an_image_of_another_client(sliced: int | None) -> None:
    run = rig(encoder_budget=8, encoder_cache_slots=16, encode_layers_per_step=sliced)
    add_heavy(run, "a", "one", tenant=A)
    add_heavy(run, "b", "two", tenant=A)
    run.add("light", 4, FakeImage("light", 8), 4, max_tokens=1, tenant=B)
    for _ in range(12):
        run.step()
    assert run.finish_of("light") == "length" and not run.events.keys() & {"a", "b"}
    assert run.runner.wanted == ("one", "two")
    run.runner.decoded = frozenset({key_of("two")})
    for _ in range(12):
        run.step()
    assert run.finish_of("b") == "length" and "a" not in run.events
    run.runner.decoded = frozenset({key_of("one")})
    run.drain()
    assert run.finish_of("a") == "length"


def test_a_heavy_image_is_not_wanted_any_more_when_its_request_ends() -> None:
    run = rig()
    add_heavy(run, "a", "one")
    run.add("text", 8, max_tokens=50)
    run.step()
    assert run.runner.wanted == ("one",)
    run.take(run.scheduler.abort("a", run.now))
    assert run.step().unwanted == (key_of("one"),) and run.runner.wanted == ()
    assert run.step().unwanted == (), "it was told"


def test_an_image_is_wanted_until_the_last_request_that_has_it_ends() -> None:
    run = rig()
    add_heavy(run, "a", "one", "one")
    add_heavy(run, "b", "one")
    run.step()
    run.take(run.scheduler.abort("a", run.now))
    assert run.step().unwanted == ()
    run.take(run.scheduler.abort("b", run.now))
    add_heavy(run, "c", "one")
    assert run.step().unwanted == (), "another one came meanwhile"
    run.take(run.scheduler.abort("c", run.now))
    run.add("text", 8)
    assert run.step().unwanted == (key_of("one"),)


def test_however_many_images_another_client_sends_none_of_an_open_request_is_ended() -> None:
    run = rig(encoder_budget=8, encoder_cache_slots=16)
    add_heavy(run, "b", "one", tenant=B)
    run.step()
    assert run.runner.wanted == ("one",)
    add_heavy(run, "a", *FLOOD, tenant=A)
    run.add("text", 400, max_tokens=9, tenant=B)  # another rank, again and again
    for _ in range(25):
        run.step()
    assert run.finish_of("text") == "length" and len(run.runner.wanted) >= 64
    assert run.runner.unwanted == ()


def test_a_heavy_image_that_is_encoded_already_is_not_decoded_again() -> None:
    run = rig()
    run.runner.decoded = frozenset({key_of("one")})
    add_heavy(run, "first", "one", max_tokens=1)
    run.drain()
    run.runner.decoded = frozenset()
    add_heavy(run, "again", "one", max_tokens=1, first_token=500)
    run.drain()
    assert run.finish_of("again") == "length" and run.runner.encoded == [key_of("one")]


def test_beside_decodes_of_a_gpu_a_heavy_image_is_told_at_once() -> None:
    """Steps that only decode are planned without a look at what waits."""
    run = rig()
    run.add("text", 8, max_tokens=50)
    run.step()
    add_heavy(run, "a", "one")
    plan = run.scheduler.schedule(1.0)
    decode = run.scheduler.schedule_async_decode()
    assert plan.decode_first and decode is not None and not decode.decode_first
    run.scheduler.commit(plan, run.runner.execute(plan), 1.5, 0.5)
    beside = run.scheduler.schedule_async_prefill(2.0)
    assert beside is not None and names(beside.decode_first, "one") == ["one"]
    assert isinstance(run.scheduler._open["a"], ScheduledRequest)
