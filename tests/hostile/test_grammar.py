"""JSON schemas that are made to be costly, sent to a running server while a neighbour chats."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.helpers.servers.hostile import ALICE, MALLORY, MAX_SCHEMA_CHECKS, watching
from tests.helpers.servers.serving import RunningServer, chat_body, error_of, until

NUM_ANSWERS = 64


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def repeats(count: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^a{{{count}}}$"}


def test_a_pattern_that_repeats_too_often_is_refused_with_both_numbers(server: RunningServer) -> None:
    error = error_of(server.chat("hi", response_format=form(repeats(120_000)), n=NUM_ANSWERS))
    assert error["code"] == "invalid_json_schema" and error["param"] == "response_format"
    assert "120000" in error["message"] and "10000" in error["message"]


COSTLY = {
    "a pattern with one way on": repeats(9_000),
    "a long constant": {"const": "ab cd " * 5_000},
    "states that double with each letter": {"type": "string", "pattern": "^[ -~]*a[ -~]{200}$"},
    "many ways on": {
        "type": "array",
        "items": {"properties": {f"k{i}": {"type": "boolean"} for i in range(400)}},
        "minItems": 9,
    },
}


@pytest.mark.parametrize("name", COSTLY)
def test_many_answers_with_a_costly_schema_do_not_stop_a_neighbour(server: RunningServer, name: str) -> None:
    """They were 64 times 50 ms of every step, and 290 MB for the first of these, more with each repeat."""
    body = chat_body("hi", response_format=form(COSTLY[name]), n=NUM_ANSWERS, max_tokens=8, temperature=1, seed=1)
    with watching(server, lambda: server.chat("hello", max_tokens=2)) as watch:
        response = server.post("/v1/chat/completions", body)
    print(f"the neighbour's slowest of {watch.num_answered}: {watch.slowest:.2f} s; +{watch.engine_growth_mb:.0f} MB")
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert error_of(response)["code"] == "invalid_json_schema"
    assert not watch.failures and watch.num_answered
    assert watch.engine_growth_mb < 150
    assert server.answers()


def test_new_schemas_of_one_client_do_not_stop_a_neighbours_text(server: RunningServer) -> None:
    def schema(number: int) -> dict[str, Any]:
        return form({"type": "object", "properties": {f"p{number}_{i}": {"type": "integer"} for i in range(40)}})

    with watching(server, lambda: server.chat("hello", max_tokens=2)) as watch:
        codes = [server.chat("hi", response_format=schema(i), max_tokens=4).status_code for i in range(8)]
    assert codes == [200] * 8
    assert not watch.failures and watch.num_answered


# --- checks take turns --------------------------------------------------------------------------------------------


class Bills:
    """Requests with a new schema each, in threads; `order` is whose were answered, one after the other."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.threads: list[threading.Thread] = []
        self.order: list[tuple[str, int]] = []  # key and status

    def send(self, key: str, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.threads)
            body = chat_body(response_format=form({"enum": [f"{id(self)} {number}"]}))
            self.threads.append(threading.Thread(target=self._ask, args=(key, body)))
            self.threads[-1].start()

    def _ask(self, key: str, body: dict[str, Any]) -> None:
        with self._server.stranger(authorization=f"Bearer {key}") as client:
            status = client.post("/v1/bill", json=body).status_code
        self.order.append((key, status))

    @property
    def num_open(self) -> int:
        """As the server sees it."""
        return int(self._server.get("/v1/engine").json()["open_requests"])

    @property
    def num_waiting(self) -> int:
        """Of those, the ones in a queue: a request is open before its body is read."""
        return int(self._server.get("/v1/engine").json()["schema_checks_waiting"])

    def all(self) -> list[tuple[str, int]]:
        for thread in self.threads:
            thread.join(120)
        return self.order


def checkers(server: RunningServer) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()  # of whichever thread
    return [child for child in children if "saccade.structured.schema_validation_worker" in child.cmdline()]


@contextmanager
def stopped(server: RunningServer) -> Iterator[Bills]:
    """The process that checks schemas stands still with one of the greedy client's."""
    bills = Bills(server)
    bills.send(MALLORY)
    assert until(lambda: checkers(server))
    (checker,) = checkers(server)
    checker.suspend()
    while bills.num_open < 1:
        bills.send(MALLORY)
        assert until(lambda: len(bills.order) + bills.num_open == len(bills.threads))
    try:
        yield bills
    finally:
        checker.resume()
        bills.all()


def test_callers_take_turns_with_their_schemas_and_wait_in_queues_of_their_own(apart: RunningServer) -> None:
    with stopped(apart) as bills:
        before = len(bills.order)
        bills.send(MALLORY, MAX_SCHEMA_CHECKS)
        assert until(lambda: bills.num_waiting == MAX_SCHEMA_CHECKS)
        bills.send(MALLORY)
        assert until(lambda: len(bills.order) > before)  # while all others wait
        assert bills.order[-1] == (MALLORY, 429)
        bills.send(ALICE)
        assert until(lambda: len(bills.order) == before + 2)
        assert bills.order[-1] == (ALICE, 200), "it came last and found a free thread"
    answered = bills.all()[before + 2 :]
    assert [status for _, status in answered] == [200] * (1 + MAX_SCHEMA_CHECKS)
