"""The time from one token of an output to the next, as Prometheus histograms: counted for every token.

Prometheus' own histogram finds its labels, takes two locks and searches its buckets in turn for each value,
which is a tenth of the server's work for a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_NAME = "inter_token_latency_seconds"
_TEXT = "One token to the next"


class InterTokenLatency(Collector):
    """Under our name by `has_media`, and under vLLM's for all. Only the event loop may call it."""

    def __init__(self, model: str, bounds: Sequence[float]) -> None:
        self._model = model
        self._bounds = tuple(bounds)
        self._counts = {has_media: [0] * (len(bounds) + 1) for has_media in (False, True)}
        self._sums = {False: 0.0, True: 0.0}

    def observe(self, seconds: float, count: int, *, has_media: bool) -> None:
        """So many tokens, each this long after the one before."""
        self._counts[has_media][bisect_left(self._bounds, seconds)] += count
        self._sums[has_media] += seconds * count

    def collect(self) -> Iterator[Metric]:
        ours = HistogramMetricFamily(f"saccade:{_NAME}", _TEXT, labels=["has_media"])
        for has_media, counts in self._counts.items():
            ours.add_metric([str(has_media).lower()], self._buckets(counts), self._sums[has_media])
        yield ours
        both = [sum(pair) for pair in zip(*self._counts.values(), strict=True)]
        theirs = HistogramMetricFamily(f"vllm:{_NAME}", _TEXT, labels=["model_name"])
        theirs.add_metric([self._model], self._buckets(both), sum(self._sums.values()))
        yield theirs

    def _buckets(self, counts: Sequence[int]) -> list[tuple[str, float]]:
        names = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        return list(zip(names, accumulate(counts), strict=True))
