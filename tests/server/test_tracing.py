"""Traces: the span of a request, its stages, its parent, and what is said without the packages."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from saccade.errors import ConfigError
from saccade.options.server import ServerOptions
from saccade.server.http.auth import Tenants
from saccade.server.http.middleware import RequestMiddleware
from saccade.server.http.origins import BrowserRules
from saccade.server.request_record import RequestRecord, TokenCounts
from saccade.server.tracing import Ended, Traces, stages
from saccade.types.events import Usage

PARENT = {b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
USAGE = Usage(
    cached_tokens=16,
    num_preemptions=0,
    arrived=1000.0,
    first_scheduled=1000.5,
    first_token=1002.0,
    finished=1005.0,
    decode_ms=200.0,
    encode_ms=700.0,
    ahead_ms=300.0,
)


COUNTS = TokenCounts(prompt_tokens=40, image_tokens=0, cached_tokens=0, completion_tokens=5)


def record(usage: Usage = USAGE, error: str = "", **moments: float | None) -> RequestRecord:
    """A moment that is None never came."""
    record = RequestRecord()
    times = {"fetch_began": 10.0, "fetched": 11.0, "submitted": 12.0, **moments}
    record._moments |= {moment: time for moment, time in times.items() if time is not None}  # type: ignore[misc]
    record.count(COUNTS, usage)
    record.fail(error)
    return record


def reported(ended: Ended, headers: dict[bytes, bytes]) -> list[Any]:
    exporter = InMemorySpanExporter()
    traces = Traces(None, "tiny", exporter)
    traces.report(ended, headers)
    traces.close()
    return list(exporter.get_finished_spans())


def ended(status: int = 200, **fields: Any) -> Ended:
    now = time.perf_counter()
    path = "/v1/chat/completions"
    return Ended("POST", path, path, status, "id-1", record(arrived=now - 1, ended=now, **fields))


def test_stages_are_counted_from_the_submission_and_follow_each_other() -> None:
    found = {stage.name: (round(stage.began, 3), round(stage.ended, 3)) for stage in stages(record())}
    assert found == {
        "fetch": (10.0, 11.0),
        "queue": (12.0, 12.5),
        "image_decode": (12.2, 12.4),  # 0.3 s of the images were done before the first step
        "encode": (12.4, 13.1),
        "prefill": (12.5, 14.0),
        "decode": (14.0, 17.0),
    }


def test_a_request_without_images_has_no_stages_of_images() -> None:
    usage = Usage(0, 0, 1000.0, 1000.5, 1002.0, 1005.0, 0.0, 0.0)
    names = [stage.name for stage in stages(record(fetched=None, usage=usage))]
    assert names == ["queue", "prefill", "decode"]
    assert not list(stages(RequestRecord()))


def test_spans_lie_below_the_clients_span() -> None:
    *children, span = reported(ended(), PARENT)
    assert span.name == "POST /v1/chat/completions"
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert {child.name for child in children} == {"fetch", "queue", "image_decode", "encode", "prefill", "decode"}
    assert all(child.parent.span_id == span.context.span_id for child in children)
    assert span.attributes["gen_ai.usage.input_tokens"] == 40 and span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.resource.attributes["service.name"] == "saccade"


@pytest.mark.parametrize(
    ("path", "headers", "status", "name"),
    [
        ("/v1/models/some/name", [(b"authorization", b"Bearer k")], 200, "GET /v1/models/{name:path}"),
        ("/v1/models/other", [], 401, "GET /v1/models/{name:path}"),
        ("/v1/anything/at/all", [(b"authorization", b"Bearer k")], 404, "GET unmatched"),
        ("/wp-login.php", [], 401, "GET unmatched"),
    ],
)
def test_the_names_of_spans_hold_nothing_that_clients_choose(
    path: str, headers: list[tuple[bytes, bytes]], status: int, name: str
) -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(None, "tiny", exporter)
    app = Starlette(routes=[Route("/v1/models/{name:path}", lambda request: PlainTextResponse("ok"))])
    server = ServerOptions(api_key=("k",))
    app.add_middleware(
        RequestMiddleware,
        tenants=Tenants(server),
        rules=BrowserRules(server),
        on_refusal=lambda _: None,
        logs=False,
        traces=traces,
        routes=app.routes,
    )
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "client": ("203.0.113.7", 1)}

    async def send(message: Any) -> None:
        pass

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(app(scope, receive, send))
    traces.close()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.attributes["http.response.status_code"]) == (name, status)  # type: ignore[index]
    assert span.attributes["url.path"] == path  # type: ignore[index]


def test_a_parent_that_is_not_sampled_has_no_spans() -> None:
    assert reported(ended(), {b"traceparent": PARENT[b"traceparent"][:-1] + b"0"}) == []


@pytest.mark.parametrize("header", [b"", b"nonsense", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01"])
def test_a_broken_parent_begins_a_trace_of_its_own(header: bytes) -> None:
    *_, span = reported(ended(), {b"traceparent": header})
    assert span.parent is None


@pytest.mark.parametrize(("status", "is_error"), [(200, False), (400, False), (503, True), (0, True)])
def test_errors_of_the_server_mark_the_span(status: int, is_error: bool) -> None:
    *_, span = reported(ended(status, error="some_code"), {})
    assert (span.status.status_code.name == "ERROR") is is_error
    assert span.attributes["error.type"] == "some_code"


def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'saccade\[otel\]'"):
        Traces("http://127.0.0.1:4318/v1/traces", "tiny")
