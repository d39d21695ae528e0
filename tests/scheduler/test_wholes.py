"""Ranges of tokens that see each other: no window cuts them, and their images are there together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from saccade.errors import RequestError
from saccade.types.request import Request
from tests.helpers.engine.scheduling import FakeImage, Part, Rig, make_request


def whole_request(name: str, *parts: Part, images: bool = False) -> Request:
    """Its prompt is one range; or all its images with what is between them are."""
    request = make_request(name, *parts)
    prompt = request.prompt
    start = prompt.spans[0].start if images else 0
    end = prompt.spans[-1].end if images else len(prompt)
    spans = tuple(replace(span, last_reader=end) for span in prompt.spans)
    return replace(request, prompt=replace(prompt, spans=spans, wholes=((start, end),)))


def test_images_of_a_range_that_do_not_fit_together_are_refused() -> None:
    rig = Rig(encoder_cache_slots=16)
    request = whole_request("r", 3, FakeImage("a", 8), FakeImage("b", 8), FakeImage("c", 8))
    with pytest.raises(RequestError, match="3 pictures of the prompt stand together and have 24 embeddings, but 16"):
        rig.scheduler.add(request, 0)


@pytest.mark.parametrize("seed", range(60))
def test_requests_that_fit_alone_all_end(seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig(encoder_cache_slots=24, encoder_budget=16, max_num_batched_tokens=20, max_num_seqs=4)
    requests = {}
    for name in [f"r{index}" for index in range(chance.randint(2, 5))]:
        images = [FakeImage(f"{name}-{number}", chance.choice([4, 6, 8])) for number in range(chance.randint(1, 3))]
        parts = [part for image in images for part in (chance.randint(1, 9), image)]
        requests[name] = whole_request(name, *parts, 2, images=chance.random() < 0.5)
        rig.scheduler.add(requests[name], 0)
    rig.drain(2_000)
    assert {rig.finish_of(name) for name in requests} == {"length"}
    for window in [window for plan in rig.plans for window in plan.windows]:
        ((start, end),) = requests[window.request_id].prompt.wholes
        assert not start < window.end < end, "a window ends inside a range of tokens that see each other"
