"""Prometheus metrics of each tenant, in a registry of their own: tenants do not see each other's.

A label is a name from the operator's settings, never one that a client can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Stats = Callable[[], Mapping[str, Any]]

_SCHEDULER = {
    "running": (GaugeMetricFamily, "Requests of a tenant being computed"),
    "waiting": (GaugeMetricFamily, "Requests of a tenant that wait"),
    "service": (CounterMetricFamily, "Service of a tenant: prompt tokens, outputs and embeddings by cost"),
}
_ENCODER_CACHE = {
    "hits": (CounterMetricFamily, "Pictures of a tenant that were found"),
    "misses": (CounterMetricFamily, "Pictures of a tenant that had to be encoded"),
    "slots": (GaugeMetricFamily, "Slots that the embeddings of a tenant's pictures take"),
}


class TenantMetrics:
    def __init__(self, stats: Stats) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"saccade:tenant_{name}", text, ("tenant", *labels), registry=self.registry)

        self._requests = counter("requests", "Requests of a tenant that its limits allowed to come in")
        self._tokens = counter("tokens", "Tokens of a tenant's prompts and outputs", "kind")
        self._pixels = counter("pixels", "Pixels of a tenant's images and frames, as they were sent")
        text = "Processor seconds of reading a tenant's requests and decoding its media"
        self._processor = counter("processor_seconds", text)
        self._refused = counter("refused", "Requests that a limit of the tenant refused", "limit")
        self.registry.register(_EngineCollector(stats))

    def arrived(self, label: str) -> None:
        self._requests.labels(label).inc()

    def used(self, label: str, prompt_tokens: int, output_tokens: int, pixels: int) -> None:
        self._tokens.labels(label, "prompt").inc(prompt_tokens)
        self._tokens.labels(label, "output").inc(output_tokens)
        self._pixels.labels(label).inc(pixels)

    def worked(self, label: str, seconds: float) -> None:
        self._processor.labels(label).inc(seconds)

    def refused(self, label: str, limit: str) -> None:
        self._refused.labels(label, limit).inc()


class _EngineCollector(Collector):
    """What the engine counts by label, read at each scrape."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._families("tenant_", _SCHEDULER, stats.get("tenants", {}))
        yield from self._families(
            "tenant_encoder_cache_", _ENCODER_CACHE, stats.get("encoder_cache_tenants", {})
        )

    def _families(
        self, prefix: str, kinds: Mapping[str, tuple[Any, str]], tenants: Mapping[str, Mapping[str, float]]
    ) -> Iterator[Metric]:
        for field, (kind, text) in kinds.items():
            family = kind(f"saccade:{prefix}{field}", text, labels=["tenant"])
            for label, values in tenants.items():
                family.add_metric([label], values[field])
            yield family
