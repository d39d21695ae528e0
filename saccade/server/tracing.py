"""OpenTelemetry traces: a span for a request and one for each of its stages, made when it has ended.

fetch ─► queue ─► prefill ─► decode        image_decode and encode lie in the queue and the prefill
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from saccade import __version__
from saccade.errors import ConfigError
from saccade.server.request_record import RequestRecord

UNMATCHED = "unmatched"
"""The route of a path that has none: names of spans must be few, and clients choose paths."""
_PARENTS = (b"traceparent", b"tracestate")


class Ended(NamedTuple):
    """A request that has ended."""

    method: str
    path: str
    route: str  # with names in place of what a client chose; UNMATCHED
    status: int  # 0: the client left before the response
    request_id: str
    record: RequestRecord


class Traces:
    def __init__(self, endpoint: str | None, model: str, exporter: Any = None) -> None:
        """`exporter` in place of one that sends to `endpoint`. ConfigError without the packages."""
        try:
            from opentelemetry.propagate import extract
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            problem = f"--otlp-traces-endpoint needs OpenTelemetry, and {error.name} is not installed"
            raise ConfigError(f"{problem}: pip install 'saccade[otel]'") from None
        self._model = model
        self._extract = extract
        self._inside = set_span_in_context
        self._server_kind = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)
        name = os.environ.get("OTEL_SERVICE_NAME", "saccade")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("saccade", __version__)

    def report(self, request: Ended, headers: Mapping[bytes, bytes]) -> None:
        """Below the span that `traceparent` names, if there is one. Sent later, by a thread."""
        offset = time.time() - time.perf_counter()
        parent = {name.decode(): headers[name].decode("latin-1") for name in _PARENTS if name in headers}
        span = self._tracer.start_span(
            f"{request.method} {request.route}",
            context=self._extract(parent),
            kind=self._server_kind,
            attributes=_attributes(request, self._model),
            start_time=_ns(request.record.time_of("arrived") + offset),
        )
        if not 0 < request.status < 500:
            span.set_status(self._error)
        inside = self._inside(span)
        for stage in stages(request.record):
            child = self._tracer.start_span(stage.name, inside, start_time=_ns(stage.began + offset))
            child.end(_ns(stage.ended + offset))
        span.end(_ns(request.record.time_of("ended") + offset))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class Stage(NamedTuple):
    name: str
    began: float
    ended: float


def stages(record: RequestRecord) -> Iterator[Stage]:
    """The engine's clock is not ours: what it measured is counted from the moment of submission.

    Of decoding and encoding images only the duration is known. Both are shown as they mostly are: one after
    the other, as much of them before the first step as was done ahead.
    """
    if record.has("fetched"):
        yield Stage("fetch", record.time_of("fetch_began"), record.time_of("fetched"))
    usage = record.usage
    if usage is None or not record.has("submitted"):
        return
    submitted = record.time_of("submitted")
    offset = submitted - usage.arrived
    scheduled = usage.finished if usage.first_scheduled is None else usage.first_scheduled
    yield Stage("queue", submitted, scheduled + offset)
    began = max(submitted, scheduled + offset - usage.ahead_ms / 1e3)
    if usage.decode_ms:
        yield Stage("image_decode", began, began + usage.decode_ms / 1e3)
    if usage.encode_ms:
        began += usage.decode_ms / 1e3
        yield Stage("encode", began, began + usage.encode_ms / 1e3)
    if usage.first_token is not None:
        yield Stage("prefill", scheduled + offset, usage.first_token + offset)
        yield Stage("decode", usage.first_token + offset, usage.finished + offset)


def _attributes(request: Ended, model: str) -> dict[str, str | int]:
    record = request.record
    attributes: dict[str, str | int] = {
        "http.request.method": request.method,
        "url.path": request.path,
        "gen_ai.request.model": model,
        "saccade.request_id": request.request_id,
    }
    if request.route != UNMATCHED:
        attributes["http.route"] = request.route
    if request.status:
        attributes["http.response.status_code"] = request.status
    if record.error:
        attributes["error.type"] = record.error
    if record.counts is not None:
        attributes["gen_ai.usage.input_tokens"] = record.counts.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.counts.completion_tokens
        attributes["saccade.image_tokens"] = record.counts.image_tokens
        attributes["saccade.cached_tokens"] = record.counts.cached_tokens
    return attributes


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
