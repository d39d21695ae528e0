"""Prometheus metrics under our own names, and the same values under vLLM's names for its dashboards.

Each instance has its own registry, so that two servers in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from saccade import __version__
from saccade.engine.encoders.encoder_set import EncoderView
from saccade.engine.ipc.client import EngineStatus, ReplicaView
from saccade.server.engine_metrics import EngineCollector
from saccade.server.inter_token_latency import InterTokenLatency
from saccade.server.recent_hour import RecentHour
from saccade.server.tenant_metrics import Stats, TenantMetrics
from saccade.types.bill import Bill
from saccade.types.events import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKENS = tuple(float(4**i) for i in range(1, 10))
_BYTES = tuple(float(4**i) for i in range(5, 14))


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended normally."""

    bills: Sequence[Bill]  # one per prompt
    usages: Sequence[Usage]  # one per output
    finish_reasons: Sequence[str]  # one per output
    generated: Sequence[int]  # tokens, one per output
    max_tokens: int
    seconds: float  # arrival to last token
    decode_seconds: float  # first token to last token

    @property
    def has_media(self) -> bool:
        return any(bill.items for bill in self.bills)


class Metrics:
    """`stats` returns the engine's counters, `replicas` those of each where there are several.

    `model` is the label `model_name` of vLLM's metrics.
    """

    def __init__(
        self,
        model: str,
        stats: Stats,
        bytes_in_flight: Callable[[], int] = lambda: 0,
        replicas: Callable[[], Sequence[ReplicaView]] = tuple,
        encoders: Callable[[], Sequence[EncoderView]] = tuple,
        status: Callable[[], EngineStatus] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._saccade = _SaccadeMetrics(self.registry)
        self._vllm = _VllmMetrics(self.registry, model)
        self._inter_token = InterTokenLatency(model, _FAST)
        self.registry.register(self._inter_token)
        self.tenants = TenantMetrics(stats)
        self.recent_hour = RecentHour()
        self.tokens_in = self.tokens_out = 0  # for the throughput line in the log
        self.registry.register(EngineCollector(stats, replicas, encoders, model, status))
        ProcessCollector(registry=self.registry)
        build = Gauge("saccade:build_info", "1, with the version", ("version",), registry=self.registry)
        build.labels(__version__).set(1)
        text = "Bytes of open requests, here and in the engine"
        Gauge("saccade:request_bytes", text, registry=self.registry).set_function(bytes_in_flight)

    def text(self, sees_tenants: bool = True) -> bytes:
        text = generate_latest(self.registry)
        return text + generate_latest(self.tenants.registry) if sees_tenants else text

    def first_token(self, seconds: float, *, has_media: bool) -> None:
        self._saccade.first_token.labels(_flag(has_media)).observe(seconds)
        self._vllm.first_token.observe(seconds)
        self.recent_hour.first_token(seconds)

    def next_tokens(self, seconds: float, count: int, *, has_media: bool) -> None:
        """`count` tokens of one output arrived this long after the preceding one."""
        self._inter_token.observe(seconds / count, count, has_media=has_media)
        self.recent_hour.next_tokens(seconds / count, count)

    def fetched(self, seconds: float, num_bytes: int | None) -> None:
        """A fetch ended. No bytes: it failed."""
        self._saccade.fetch.labels("failed" if num_bytes is None else "ok").observe(seconds)
        if num_bytes is not None:
            self._saccade.fetch_bytes.observe(num_bytes)

    def finished(self, request: Finished) -> None:
        self._saccade.finished(request)
        self._vllm.finished(request)
        self.recent_hour.finished(request.bills, sum(request.generated))
        self.tokens_in += sum(bill.prompt_tokens for bill in request.bills)

    def failed(self, reason: str) -> None:
        """A request that was admitted and ended without a response."""
        self._saccade.failed.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """A request that was not admitted."""
        self._saccade.refused.labels(reason).inc()
        self._vllm.refused.labels(self._model, reason).inc()

    def request_counts(self) -> dict[str, dict[str, int]]:
        """Requests since the start, for the page at `/`: answers, failures and refusals by their reasons."""
        ours = self._saccade
        counters = {"answered": ours.requests, "failed": ours.failed, "refused": ours.refused}
        return {name: _by_first_label(counter) for name, counter in counters.items()}

    def media_refused(self, code: str) -> None:
        self._saccade.media_refused.labels(code).inc()

    def tool_call_problem(self, reason: str) -> None:
        self._saccade.tool_call_problems.labels(reason).inc()

    def media_mistyped(self, count: int) -> None:
        """Images of another format than their data URL says."""
        self._saccade.media_mistyped.inc(count)


def _by_first_label(counter: Counter) -> dict[str, int]:
    counts: dict[str, int] = {}
    (metric,) = counter.collect()
    for sample in metric.samples:
        if sample.name.endswith("_total"):
            reason = next(iter(sample.labels.values()))
            counts[reason] = counts.get(reason, 0) + int(sample.value)
    return counts


def _flag(value: bool) -> str:
    return str(value).lower()


class _SaccadeMetrics:
    """Metrics with the prefix `saccade:`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float] = _SLOW, *labels: str) -> Histogram:
            return Histogram(f"saccade:{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"saccade:{name}", text, labels, registry=registry)

        media = "has_media"
        self.requests = counter("requests", "Requests that were answered", "finish_reason", media)
        self.failed = counter("request_failures", "Requests that ended without an answer", "reason")
        self.refused = counter("admission_rejected", "Requests turned away before any work", "reason")
        self.media_refused = counter("media_rejected", "Pictures that were refused", "code")
        self.media_mistyped = counter("media_mistyped", "Pictures of another format than their data URL says")
        text = "Tool calls that cannot be read, end early, name no offered tool or do not follow its schema"
        self.tool_call_problems = counter("tool_call_problems", text, "reason")
        self.tokens = counter("tokens", "Tokens by kind", "kind")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", _SLOW, media)
        self.e2e = histogram("e2e_latency_seconds", "Arrival to last token", _SLOW, media)
        self.queue = histogram("queue_seconds", "Waiting for the first step")
        self.fetch = histogram("media_fetch_seconds", "Fetching one picture", _SLOW, "outcome")
        self.fetch_bytes = histogram("media_fetch_bytes", "Bytes of a fetched picture", _BYTES)
        self.decode = histogram("media_decode_seconds", "Decoding a request's pictures", _SLOW)
        self.encode = histogram("encode_seconds", "Encoding a request's pictures", _SLOW)
        self.prefill = histogram("prefill_seconds", "First step to first token")
        self.image_tokens = histogram("image_tokens", "Tokens of one picture", _TOKENS)

    def finished(self, request: Finished) -> None:
        media = _flag(request.has_media)
        for reason in request.finish_reasons:
            self.requests.labels(reason, media).inc()
        self.e2e.labels(media).observe(request.seconds)
        for bill in request.bills:
            self.tokens.labels("text").inc(bill.text_tokens)
            self.tokens.labels("image").inc(bill.image_tokens)
            self.tokens.labels("video").inc(bill.video_tokens)
            for item in bill.items:
                self.image_tokens.observe(item.tokens)
        self.tokens.labels("cached").inc(sum(usage.cached_tokens for usage in request.usages))
        self.tokens.labels("generated").inc(sum(request.generated))
        for usage in request.usages:
            if usage.first_scheduled is None:
                continue
            self.queue.observe(usage.first_scheduled - usage.arrived)
            if usage.first_token is not None:
                self.prefill.observe(usage.first_token - usage.first_scheduled)
            if request.has_media:
                self.decode.observe(usage.decode_ms / 1e3)
                self.encode.observe(usage.encode_ms / 1e3)


class _VllmMetrics:
    """Metrics with the names, types and labels of vLLM, for its dashboards."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float] = _SLOW) -> Histogram:
            metric = Histogram(f"vllm:{name}", text, ("model_name",), buckets=buckets, registry=registry)
            return metric.labels(model)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ("model_name", *labels), registry=registry)

        self._model = model
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens").labels(model)
        self.generation_tokens = counter("generation_tokens", "Generated tokens").labels(model)
        self.success = counter("request_success", "Answers by the reason they ended", "finished_reason")
        self.refused = counter("admission_rejections", "Requests turned away", "reason")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token")
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token")
        self.queue = histogram("request_queue_time_seconds", "Waiting for the first step")
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token")
        self.decode = histogram("request_decode_time_seconds", "First token to last token")
        self.num_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.num_generated = histogram("request_generation_tokens", "Generated tokens of an answer", _TOKENS)
        self.max_tokens = histogram("request_max_num_generation_tokens", "Largest answer asked for", _TOKENS)

    def finished(self, request: Finished) -> None:
        for reason in request.finish_reasons:
            self.success.labels(self._model, reason).inc()
        for bill in request.bills:
            self.prompt_tokens.inc(bill.prompt_tokens)
            self.num_prompt.observe(bill.prompt_tokens)
        for count in request.generated:
            self.generation_tokens.inc(count)
            self.num_generated.observe(count)
            self.max_tokens.observe(request.max_tokens)
        self.e2e.observe(request.seconds)
        self.decode.observe(request.decode_seconds)
        for usage in request.usages:
            if usage.first_scheduled is not None:
                self.queue.observe(usage.first_scheduled - usage.arrived)
                if usage.first_token is not None:
                    self.prefill.observe(usage.first_token - usage.first_scheduled)
