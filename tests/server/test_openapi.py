"""Requests made from /openapi.json, good and bad ones: none may be a 5xx, and every error has our form."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.generation import GenerationMode

from tests.helpers.servers.serving import RunningServer

PER_ROUTE = 8
ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/bill"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/plan"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_made_from_the_document_is_a_server_error(
    document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    @seed(1)
    @settings(max_examples=PER_ROUTE, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        _keep_short(case.body)
        response = case.call()
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            is_anthropic = path.startswith("/v1/messages")
            own = {"message", "type", "details"} if is_anthropic else {"message", "type", "param", "code"}
            assert own >= set(response.json()["error"]) >= own - {"details"}

    check()


def test_a_normal_request_works_after_all_of_them(server: RunningServer) -> None:
    assert server.answers()


def _keep_short(body: Any) -> None:
    """A good request may ask for thousands of tokens; that costs time and shows nothing."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            value = body.get(name)
            if value is None or (isinstance(value, int) and value > 2):
                body[name] = 2
        if isinstance(body.get("n"), int) and body["n"] > 2:
            body["n"] = 2
