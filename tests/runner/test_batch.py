"""What the runner remembers of a request's tokens, whether someone looks at them now and then or never."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.runner.batch import RequestState
from saccade.types.step import Admission
from tests.helpers.engine.scheduling import make_request


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.integers(0, 99), max_size=80),
    answer=st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=200),
)
def test_tokens_of_an_answer_are_those_that_were_appended_whoever_looked_meanwhile(
    before: list[int], answer: list[tuple[int, bool]]
) -> None:
    request = make_request("a", [7, 8, 9], max_tokens=500)
    state, known = RequestState(Admission(request, tuple(before), ())), list(before)
    for token, is_looked_at in answer:
        state.append(token)
        known.append(token)
        if is_looked_at:
            assert state.row().output_ids.tolist() == known
    assert state.tokens(1, state.num_tokens).tolist() == [8, 9, *known]
    assert state.last_token == [9, *known][-1]
