"""Heavy images: decoded before they take budget or space of the encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from saccade.scheduler.request import ScheduledRequest
from saccade.types import HEAVY_PIXELS, Size, StepPlan, StepResult, Tenant
from tests.helpers.scheduling import FakeImage, FakeRunner, Rig, key_of, make_request, names

A, B = Tenant("A"), Tenant("B")


class DecodingRunner(FakeRunner):
    """Heavy images are decoded when a test says so."""

    decoded: frozenset[bytes] = frozenset()
    wanted: tuple[str, ...] | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.heavy is not None:
            self.wanted = tuple(names(plan.heavy, "one", "two"))
        assert all(not item.is_heavy or item.key in self.decoded for item in plan.encode), "given too early"
        return replace(super().execute(plan), decoded=self.decoded)


def rig(**changes: Any) -> Rig:
    made = Rig(**changes)
    made.runner = DecodingRunner(made.config)
    return made


def add_heavy(rig: Rig, request_id: str, name: str, **how: Any) -> None:
    request = make_request(request_id, 4, FakeImage(name, 8), 4, **how)
    (item,) = request.prompt.items
    slow = replace(item, header=replace(item.header, size=Size(HEAVY_PIXELS + 1, 1)))
    rig.scheduler.add(replace(request, prompt=replace(request.prompt, items=(slow,))), rig.now)


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
    run.step()
    assert run.runner.wanted == ()
    assert run.step().heavy is None, "nothing has changed since"


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
    assert plan.heavy is not None and decode is not None and decode.heavy is None
    run.scheduler.commit(plan, run.runner.execute(plan), 1.5)
    beside = run.scheduler.schedule_async_prefill(2.0)
    assert beside is not None and names(beside.heavy or (), "one") == ["one"]
    assert isinstance(run.scheduler._open["a"], ScheduledRequest)
