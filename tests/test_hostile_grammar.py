"""JSON schemas that are made to be costly, sent to a running server while a neighbour chats."""

from __future__ import annotations

from typing import Any

from tests.hostile import watching
from tests.serving import RunningServer, chat_body, error_of

NUM_ANSWERS = 64


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def repeats(count: int) -> dict[str, Any]:
    return form({"type": "string", "pattern": f"^a{{{count}}}$"})


def test_a_pattern_that_repeats_too_often_is_refused_with_both_numbers(server: RunningServer) -> None:
    error = error_of(server.chat("hi", response_format=repeats(120_000), n=NUM_ANSWERS))
    assert error["code"] == "invalid_json_schema" and error["param"] == "response_format"
    assert "120000" in error["message"] and "10000" in error["message"]


def test_many_answers_with_a_large_pattern_do_not_stop_a_neighbour(server: RunningServer) -> None:
    """Before it was compiled once and copied, each of the answers compiled it inside a step: everybody waited."""
    body = chat_body("hi", response_format=repeats(9_000), n=NUM_ANSWERS, max_tokens=8)
    with watching(server, lambda: server.chat("hello", max_tokens=2)) as watch:
        response = server.post("/v1/chat/completions", body)
    print(f"the neighbour's slowest of {watch.num_answered}: {watch.slowest:.2f} s; +{watch.engine_growth_mb:.0f} MB")
    assert response.status_code in (200, 400)
    assert not watch.failures and watch.num_answered
    assert watch.engine_growth_mb < 512
    assert server.answers()


def test_new_schemas_of_one_client_do_not_stop_a_neighbours_text(server: RunningServer) -> None:
    def schema(number: int) -> dict[str, Any]:
        return form({"type": "object", "properties": {f"p{number}_{i}": {"type": "integer"} for i in range(40)}})

    with watching(server, lambda: server.chat("hello", max_tokens=2)) as watch:
        codes = [server.chat("hi", response_format=schema(i), max_tokens=4).status_code for i in range(8)]
    assert codes == [200] * 8
    assert not watch.failures and watch.num_answered
