"""The scheduler and the decode stage together: images that are decoded first hold up neither each other nor others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace

import pytest

from saccade.media.media_workers import Ticket
from saccade.runner.encoder.decode_stage import DecodeStage
from saccade.types.media import HEAVY_PIXELS, Key, MediaItem, Size
from saccade.types.request import Tenant
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.scheduling import FakeImage, FakeRunner, Rig, make_request

SLOTS = 8  # of each image, and its patches
AHEAD = 16  # patches decoded ahead
TENANTS = [Tenant("A"), Tenant("B")]


class StagedRunner(FakeRunner):
    """Decodes in a stage, in the order of the real runner; all that has begun is done after a step."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.config)
        self.rig = rig
        self.decoded = 0
        self.ended: set[Key] = set()
        self.stage: DecodeStage[MediaItem] = DecodeStage(self._decode, 2, 1, AHEAD)

    def _decode(self, item: MediaItem, ticket: Ticket) -> MediaItem:
        self.decoded += 1
        return item

    def execute(self, plan: StepPlan) -> StepResult:
        self.stage.end(plan.unwanted)
        self.ended |= set(plan.unwanted)
        for item in plan.encode:
            assert not item.is_decoded_first or self.stage.is_done(item.key), "the step would wait for it"
            self.stage.take(item)
        self.stage.drop_expected({item.key for item in plan.prefetch})
        self.stage.start([], plan.prefetch)
        self.stage.make_room(plan.decode_first, ())
        self.stage.start([], plan.decode_first)
        self._check()
        wait([begun.future for begun in self.stage._begun.values()])
        return replace(super().execute(plan), decoded=self.stage.decoded_first())

    def _check(self) -> None:
        assert len(self.stage._of(heavy=True)) <= 2, "what is ready has a bound"
        assert sum(begun.item.geometry.grid.patches for begun in self.stage._of(heavy=False)) <= AHEAD
        assert not self.ended & self.rig.scheduler._encoder._wanted.keys(), "an open request wants it"
        self.ended.clear()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.runner.stage.close()


def make_rig(rigs: list[Rig], **changes: object) -> Rig:
    rig = Rig(**changes)
    rig.runner = StagedRunner(rig)
    rigs.append(rig)
    return rig


def as_heavy(item: MediaItem) -> MediaItem:
    return replace(item, header=replace(item.header, size=Size(HEAVY_PIXELS + 1, 1)))


def as_page(item: MediaItem) -> MediaItem:
    return replace(item, page=0)


def add(rig: Rig, name: str, count: int, tenant: Tenant, draw: random.Random) -> None:
    """A request with so many images."""
    parts = [part for i in range(count) for part in (FakeImage(f"{name} {i}", SLOTS), 4)]
    request = make_request(name, 4, *parts, tenant=tenant, max_tokens=1)
    kinds = [as_heavy, as_page, lambda item: item]
    items = (draw.choices(kinds, (3, 2, 1))[0](item) for item in request.prompt.items)
    items = tuple(replace(item, client=tenant.name, owner=name) for item in items)
    rig.scheduler.add(replace(request, prompt=replace(request.prompt, items=items)), rig.now)


@pytest.mark.parametrize("seed", range(10))
def test_every_request_ends_whatever_waits_decoded(rigs: list[Rig], seed: int) -> None:
    draw = random.Random(seed)
    rig = make_rig(
        rigs,
        max_num_seqs=1 + seed % 3,
        encoder_budget=draw.choice([8, 16]),
        encoder_cache_slots=draw.choice([16, 24, 32]),
        encode_layers_per_step=[None, 1][seed % 2],
    )
    waiting = [(f"r{i}", draw.choice([1, 4, 6, 8]), draw.choice(TENANTS)) for i in range(20)]
    images = sum(count for _, count, _ in waiting)
    while waiting:
        if draw.random() < 0.2:
            add(rig, *waiting.pop(), draw)
        rig.step()
        gone = f"r{draw.randrange(20)}"
        if draw.random() < 0.02 and gone in rig.scheduler._open:
            rig.take(rig.scheduler.abort(gone, rig.now))
    rig.drain(1_000)
    rig.add("last", 4, max_tokens=1)
    rig.drain()  # its plan tells what nobody wants any more
    assert not rig.runner.stage.keys(), "nothing waits decoded for nobody"
    assert rig.runner.decoded < 2 * images, "few are decoded again"
