"""Grammars beside the steps: compiled once, copied, budgeted; whoever waits for one holds up nobody else."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import LLM, SamplingParams
from saccade.engine.async_core import AsyncEngineCore
from saccade.engine.core import EngineCore
from saccade.structured import grammar, schema
from saccade.structured.grammar import Allowance, Budget, Grammar, Grammars
from saccade.types.events import TokenEvent
from saccade.types.prompt import Prompt
from saccade.types.request import Request
from tests.helpers.engine.scheduling import make_config, make_request
from tests.helpers.kernels.launching import Launching

LIST = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 4, "maxItems": 4}
FREE = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "Describe this image in one sentence."


def held_to(schema: Any, **given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, "structured": json.dumps(schema), **given})


def request(schema: Any = LIST, request_id: str = "r/0", salt: bytes = b"", n: int = 1) -> Request:
    prompt = Prompt([1], (), (), np.zeros((1, 1), np.int32), 1, b"\0" * 40, salt)
    return Request(request_id, prompt, held_to(schema, n=n), 8, frozenset({3}), 0)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schemas that were compiled."""
    seen: list[str] = []

    def counting(tokenizer: Any, text: str, answers: int) -> Any:
        seen.append(text)
        return schema.compiled(tokenizer, text, answers)

    monkeypatch.setattr(grammar, "compiled", counting)
    return seen


@pytest.fixture
def grammars(qwen2_vl_folder: Path) -> Iterator[Grammars]:
    made = Grammars(qwen2_vl_folder, 460)
    yield made
    made.close()


@pytest.fixture
def llm(qwen2_vl_folder: Path) -> Iterator[LLM]:
    made = LLM(model=str(qwen2_vl_folder), max_model_len=512, kv_cache_gb=0.05, max_pixels=60_000, use_tqdm=False)
    yield made
    made.engine.core.scheduler.check()
    made.close()


def is_empty(llm: LLM) -> bool:
    """Nothing is left of any request's grammar."""
    grammars: Any = llm.engine.core._grammars
    return not (grammars._open or grammars._pending)


# --- compiled once ------------------------------------------------------------------------------------------------


def test_all_answers_of_a_request_share_one_compiled_schema(llm: LLM, compiles: list[str]) -> None:
    outs = llm.generate(PROMPT, held_to(LIST, n=64, temperature=1.0, seed=1), use_tqdm=False)[0].outputs
    assert len(compiles) == 1
    for out in outs:
        jsonschema.validate(json.loads(out.text), LIST)
    assert is_empty(llm)


def test_the_next_request_finds_the_schema_compiled(llm: LLM, compiles: list[str]) -> None:
    for _ in range(3):
        llm.generate(PROMPT, held_to(LIST), use_tqdm=False)
    assert len(compiles) == 1


def test_no_tenant_can_tell_what_schemas_others_use(grammars: Grammars, compiles: list[str]) -> None:
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        made = grammars.of(request(request_id=name, salt=salt))
        assert made is not None and made.allowed() is not None
    assert len(compiles) == 2


def test_compiled_schemas_are_forgotten_by_number_and_by_size(
    grammars: Grammars, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(number: int, letters: int = 1) -> None:
        made = grammars.of(request({"enum": ["x" * letters, number]}, f"{number}/{letters}"))
        assert made is not None and made.allowed() is not None
        grammars.end(f"{number}/{letters}")

    monkeypatch.setattr(grammar, "_MAX_TEMPLATES", 3)
    for number in range(5):
        use(number)
    assert len(grammars._templates) == 3
    use(4)
    assert len(compiles) == 5  # it was still there
    use(0)
    assert len(compiles) == 6
    monkeypatch.setattr(grammar, "_TEMPLATE_BYTES", 100 * grammar._BYTES_PER_LETTER)
    use(7, letters=80)
    assert len(grammars._templates) == 1


def test_an_answer_that_ends_gives_its_grammar_back(grammars: Grammars) -> None:
    made = grammars.of(request())
    assert made is not None and made.allowed() is not None
    gone = weakref.ref(made)
    grammars.end("r/0")
    grammars._masking.submit("r/0", int).result(10)  # behind what frees it
    assert made._matcher is None
    del made
    assert gone() is None and not grammars._budgets


def test_a_request_that_ends_before_its_grammar_is_there_leaves_nothing(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(grammar, "compiled", lambda *given: go.wait(120) and schema.compiled(*given))
    grammars.of(request())
    assert grammars.not_ready(2, 0.0) == {"r/0"}
    grammars.end("r/0")
    assert not grammars.not_ready(2, 0.0)
    go.set()
    assert grammars.of(request()).allowed() is not None  # type: ignore[union-attr]
    assert grammars.not_ready(2, 10.0) == frozenset()


# --- beside the steps ---------------------------------------------------------------------------------------------


def ends(llm: LLM, request_id: str, max_steps: int = 200) -> dict[str, Any]:
    """Steps until this request has ended; what has ended by then."""
    done: dict[str, Any] = {}
    for _ in range(max_steps):
        done |= {out.request_id: out for out in llm.engine.step() if out.finished}
        if request_id in done:
            return done
    raise AssertionError(f"{request_id} has not ended in {max_steps} steps")


@pytest.mark.parametrize("where", ["compiling", "masking"])
def test_others_are_answered_while_a_grammar_takes_its_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    go = threading.Event()
    if where == "compiling":
        monkeypatch.setattr(grammar, "compiled", lambda *given: go.wait(120) and schema.compiled(*given))
    else:
        make = Grammar.make_mask
        monkeypatch.setattr(Grammar, "make_mask", lambda self: go.wait(120) and make(self))
    llm.engine.add_request("slow", PROMPT, held_to(LIST, n=3))
    for i in range(3):
        llm.engine.add_request(f"quick{i}", PROMPT, FREE)
        assert "slow" not in ends(llm, f"quick{i}")
    go.set()
    out = ends(llm, "slow")["slow"]
    assert out.error is None and json.loads(out.outputs[2].text)
    assert is_empty(llm)


def test_an_aborted_request_is_not_waited_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(grammar, "compiled", lambda *given: go.wait(120) and schema.compiled(*given))
    llm.engine.add_request("slow", PROMPT, held_to(LIST))
    llm.engine.add_request("quick", PROMPT, FREE)
    ends(llm, "quick")
    llm.engine.abort_request("slow")
    assert not llm.engine.core.has_unfinished() and is_empty(llm)
    go.set()


# --- budgets ------------------------------------------------------------------------------------------------------


def test_an_allowance_is_spent_by_the_processors_time_and_earned_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(times))
    given = Allowance(at_once=2.0, per_token=0.75)
    with given.spending():
        pass
    assert not given.is_spent
    for _ in range(9):
        given.earn()  # no more than at the start is saved up
    for spent in (False, True):
        assert given.is_spent is spent
        if not spent:
            with given.spending():
                pass
            given._left -= 0.1
    given.earn()
    assert not given.is_spent


@pytest.mark.parametrize("part", ["step", "masks"])
def test_a_request_that_takes_more_than_its_share_ends_alone_with_a_sentence(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    class Spent(Budget):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, part, Allowance(at_once=-1.0, per_token=0.0))

    alone = llm.generate(PROMPT, FREE, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setattr(grammar, "Budget", Spent)
    params = [held_to(LIST, n=4), SamplingParams(temperature=0, structured='start: "a" "b"'), FREE]
    costly, spelled, free = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert costly.error is not None and costly.error.code == "invalid_json_schema"
    assert spelled.error is not None and spelled.error.code == "invalid_grammar"
    assert "more than its share" in costly.error.message
    assert free.outputs[0].token_ids == alone
    assert is_empty(llm)


def test_the_answers_of_a_request_have_one_budget_and_requests_their_own(grammars: Grammars) -> None:
    made = [grammars.of(request(request_id=name)) for name in ("a/0", "a/1", "b/0")]
    budgets = [one._budget for one in made if one is not None]
    assert budgets[0] is budgets[1] and budgets[0] is not budgets[2]


def test_a_grammar_that_breaks_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the library has a bug")

    monkeypatch.setattr("saccade.structured.grammar.fill_next_token_bitmask", broken)
    bad, free = llm.generate([PROMPT, PROMPT], [held_to(LIST), FREE], use_tqdm=False)
    assert bad.error is not None and "bug" not in bad.error.message
    assert free.error is None


LONG = {"type": "string", "const": "ab cd " * 400}


def test_text_that_must_follow_is_not_written_out_for_each_token(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library forces it tokenizes as a whole, every time: a long constant took seconds of each step."""
    made = grammars.of(request(LONG))
    assert made is not None
    bits = made.allowed()
    assert bits is not None and np.unpackbits(bits.view(np.uint8)).sum() >= 1
    assert made._matcher is not None and made._matcher.compute_ff_tokens() == []


def test_more_answers_have_smaller_grammars() -> None:
    states = [schema.limits(n).max_lexer_states * n for n in (1, 8, 64)]
    assert max(states) <= 256_000 and schema.limits(64).max_lexer_states >= 4_000


# --- the core -----------------------------------------------------------------------------------------------------


class FakeGrammars:
    """Holds what it is told to hold."""

    has_open = True

    def __init__(self) -> None:
        self.holding: frozenset[str] = frozenset()
        self.open: set[str] = set()

    def of(self, request: Request) -> None:
        self.open.add(request.request_id)

    def not_ready(self, num_open: int, patience: float) -> frozenset[str]:
        return self.holding & self.open

    def end(self, request_id: str) -> None:
        self.open.remove(request_id)


def make_core(kind: type[EngineCore]) -> tuple[EngineCore, FakeGrammars]:
    config, grammars = make_config(num_blocks=40, max_num_seqs=4), FakeGrammars()
    return kind(config, Launching(config), grammars=grammars), grammars


def ended(events: list[TokenEvent]) -> list[str]:
    return [event.request_id for event in events if event.finish_reason]


@pytest.mark.parametrize("kind", [EngineCore, AsyncEngineCore])
def test_a_held_request_sits_steps_out_and_others_go_on(kind: type[EngineCore]) -> None:
    core, grammars = make_core(kind)
    grammars.holding = frozenset({"a", "b"})
    for name in "abcd":
        core.add(make_request(name, 5, max_tokens=4, temperature=0))
    done: list[str] = []
    for _ in range(12):
        done += ended(core.step())
    assert sorted(done) == ["c", "d"] and grammars.open == {"a", "b"}
    grammars.holding = frozenset({"b"})
    for _ in range(12):
        done += ended(core.step())
    assert done[2:] == ["a"]
    core.abort("b")
    assert not grammars.open and not core.scheduler.has_unfinished()


@pytest.mark.parametrize("kind", [EngineCore, AsyncEngineCore])
def test_grammars_end_with_a_step_that_breaks(kind: type[EngineCore]) -> None:
    core, grammars = make_core(kind)
    core.add(make_request("a", 5, max_tokens=4, temperature=0))
    core.runner.execute = lambda plan: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    while core.has_unfinished():
        core.step()
    assert not grammars.open


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", [EngineCore, AsyncEngineCore])
def test_whoever_is_held_and_when_every_request_ends_once(kind: type[EngineCore], data: st.DataObject) -> None:
    core, grammars = make_core(kind)
    names = [f"r{i}" for i in range(data.draw(st.integers(1, 7)))]
    for i, name in enumerate(names):
        length = data.draw(st.integers(1, 60))
        core.add(make_request(name, length, max_tokens=data.draw(st.integers(1, 12)), first_token=i, temperature=0))
    done: list[str] = []
    for step in range(500):
        if not core.has_unfinished():
            break
        held = data.draw(st.sets(st.sampled_from(names))) if step < 40 else set()
        grammars.holding = frozenset(held)
        done += ended(core.step())
        core.scheduler.check()
    assert sorted(done) == sorted(names) and not grammars.open


def test_the_answers_to_one_request_are_known_by_their_ids() -> None:
    asked = request(request_id="a/b/3")
    assert asked.family == "a/b" and replace(asked, request_id="alone").family == "alone"
