"""States of recurrent layers follow their requests: whoever goes on behind a prefix goes on with the prefix's state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.random_workloads import CONFIGS, REQUESTS, assert_nothing_is_held, drive
from tests.helpers.engine.scheduling import BLOCK, FakeImage, FakeRunner, Rig


class StatefulRunner(FakeRunner):
    """A state is the list of records it has seen, so one that belongs to another text shows as a difference."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[str, list[bytes]] = {}
        self.kept: dict[int, list[bytes]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.freed_requests:
            self.seen.pop(request_id, None)
        for admission in plan.admitted:
            request_id, state = admission.request.request_id, admission.state
            assert request_id not in self.seen, "a request with a state was given another"
            self.seen[request_id] = list(self.kept[state.row]) if state else []
            assert len(admission.block_ids) * self.block_size == (state.num_tokens if state else 0)
        result = super().execute(plan)
        for work in plan.windows:
            records, seen = self.records[work.request_id], self.seen[work.request_id]
            end = self._valid_end(work, result.failed)
            assert len(seen) == work.start, "a window begins where its state is not"
            seen += records[work.start : end]
            assert seen == records[:end], f"{work.request_id} went on with a state that is not its own"
            for place, row in work.checkpoints:
                assert work.start < place <= work.end
                self.kept[row] = seen[:place] if place <= end else [b"never computed"]
        return result


def rig(**changes: Any) -> Rig:
    made = Rig(broken=["broken"], **{"state_rows": 4, **changes})
    made.runner = StatefulRunner(made.config, ["broken"])
    return made


def computed(made: Rig, request_id: str) -> int:
    """Where the first window of a request began."""
    return next(work.start for plan in made.plans for work in plan.windows if work.request_id == request_id)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=14), st.sampled_from([0, 1, 2, 20]))
def test_any_workload_goes_on_with_the_states_of_its_own_text(config: dict, requests: list, rows: int) -> None:
    made = rig(**config, state_rows=rows)
    drive(made, requests)
    assert_nothing_is_held(made)


def test_the_same_prompt_begins_behind_its_last_full_block() -> None:
    made = rig()
    for name in "ab":
        made.add(name, 3 * BLOCK + 1)
        made.drain()
    assert [computed(made, name) for name in "ab"] == [0, 3 * BLOCK]


def test_another_question_about_a_image_begins_behind_the_image() -> None:
    made = rig()
    for name, question in (("a", [201, 202, 203, 204, 205, 206]), ("b", [301, 302])):
        made.add(name, 1, FakeImage("p", 2 * BLOCK), question)
        made.drain()
    assert computed(made, "b") == 2 * BLOCK


def test_without_a_state_behind_them_found_blocks_are_computed_again() -> None:
    made = rig()
    made.add("a", 5 * BLOCK)
    made.drain()
    made.add("b", 2 * BLOCK + 1)  # its blocks are there, a state behind them is not
    made.drain()
    assert computed(made, "b") == 0 and made.tokens_of("b")


def test_the_longest_unused_state_makes_room() -> None:
    made = rig(state_rows=2)
    for name, first in (("a", 100), ("b", 200), ("a again", 100), ("c", 300), ("a last", 100), ("b last", 200)):
        made.add(name, 2 * BLOCK + 1, first_token=first)
        made.drain()
    assert [computed(made, name) for name in ("a again", "a last", "b last")] == [2 * BLOCK, 2 * BLOCK, 0]


def test_two_requests_of_one_step_do_not_share_a_state_that_is_still_being_computed() -> None:
    made = rig()
    for name in "ab":
        made.add(name, 3 * BLOCK + 1)
    made.drain()
    assert [computed(made, name) for name in "ab"] == [0, 0]


def test_what_a_failed_image_left_is_not_kept() -> None:
    made = rig()
    made.add("a", BLOCK, FakeImage("broken", BLOCK), 2 * BLOCK)
    made.drain()
    made.add("b", BLOCK, FakeImage("broken", BLOCK), 2 * BLOCK)
    made.drain()
    assert made.finish_of("b") == "error" and computed(made, "b") == 0


def test_models_without_such_layers_go_on_anywhere() -> None:
    made = Rig(state_rows=None)
    made.add("a", 5 * BLOCK)
    made.drain()
    made.add("b", 2 * BLOCK + 1)
    made.drain()
    assert computed(made, "b") == 2 * BLOCK and not any(
        work.checkpoints for plan in made.plans for work in plan.windows
    )
