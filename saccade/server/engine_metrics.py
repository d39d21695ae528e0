"""Prometheus metrics of the engine: its counters, read at each scrape. With replicas, each has a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.engine.encoders.encoder_set import EncoderView
from saccade.engine.ipc.client import EngineStatus, ReplicaView
from saccade.server.tenant_metrics import Stats

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Values = Mapping[str, tuple[str, float]]  # what it counts, and the value


class EngineCollector(Collector):
    def __init__(
        self,
        stats: Stats,
        replicas: Callable[[], Sequence[ReplicaView]],
        encoders: Callable[[], Sequence[EncoderView]],
        model: str,
        status: Callable[[], EngineStatus] | None = None,
    ) -> None:
        self._stats = stats
        self._replicas = replicas
        self._encoders = encoders
        self._model = model
        self._status = status

    def collect(self) -> Iterator[Metric]:
        replicas = self._replicas()
        stats = self._stats()
        engines = {str(index): view.stats for index, view in enumerate(replicas)} or {"": stats}
        families: dict[str, Any] = {}
        for replica, values in engines.items():
            labels = {"replica": replica} if replica else {}
            as_vllm = {"model_name": self._model}
            if replica:
                as_vllm["engine"] = replica
            if values:
                gauges = {**_gauges(values), **_gpu_gauges(values)}
                _add(families, "saccade", labels, gauges, _counters(values))
                if "kv_events" in values:
                    _add(families, "saccade", labels, {}, _event_counters(values["kv_events"]))
                for tier, fields in values.get("embedding_tiers", {}).items():
                    _add(families, "saccade", {**labels, "tier": tier}, *_tier_values(fields))
                if values.get("remote_encoders"):
                    _add(families, "saccade", labels, {}, _remote_counters(values["remote_encoders"]))
                _add(families, "vllm", as_vllm, _vllm_gauges(values), _vllm_counters(values))
        for index, view in enumerate(replicas):
            _add(families, "saccade", {"replica": str(index)}, _state_gauges(view), _state_counters(view))
        for index, encoder in enumerate(self._encoders()):
            _add(families, "saccade", {"encoder": str(index)}, *_encoder_values(encoder))
        if self._status is not None:
            _add(families, "saccade", {}, *_status_values(self._status()))
        if replicas and stats:
            text = "Requests that moved to another replica when theirs died"
            _add(families, "saccade", {}, {}, {"requests_moved": (text, stats.get("moved", 0))})
        yield from families.values()


def _add(
    families: dict[str, Any], prefix: str, labels: Mapping[str, str], gauges: Values, counters: Values
) -> None:
    kinds: tuple[tuple[Family, Values], ...] = ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters))
    for kind, values in kinds:
        for short, (text, value) in values.items():
            name = f"{prefix}:{short}"
            family = families.setdefault(name, kind(name, text, labels=list(labels)))
            family.add_metric(list(labels.values()), value)


def _gauges(stats: Mapping[str, Any]) -> Values:
    kv = stats["kv"]
    cache = stats["encoder_cache"]
    slot_bytes = stats.get("embedding_bytes_per_slot", 0)
    host = stats["kv_offload"]
    block_bytes = stats.get("kv_bytes_per_block", 0)
    return {
        "running": ("Requests being computed", stats["running"]),
        "waiting": ("Requests that wait", stats["waiting"]),
        "engine_resident_bytes": ("Memory of the engine's process", stats.get("resident_bytes", 0)),
        "kv_blocks_used": ("KV blocks held by requests", kv["used"]),
        "kv_blocks_idle": ("KV blocks kept for reuse", kv["idle"]),
        "kv_blocks_total": ("KV blocks there are", kv["total"]),
        "kv_offload_used_bytes": ("KV blocks in host memory", host["used"] * block_bytes),
        "kv_offload_total_bytes": ("Host memory for KV blocks", host["total"] * block_bytes),
        "encoder_cache_used_bytes": ("Embeddings kept", cache["slots_used"] * slot_bytes),
        "encoder_cache_total_bytes": ("Embeddings that fit", cache["slots_total"] * slot_bytes),
    }


def _gpu_gauges(stats: Mapping[str, Any]) -> Values:
    """Nothing on a CPU."""
    memory = stats.get("gpu_memory", {})
    texts = {
        "used": "Memory of the engine's GPU in use, by all processes",
        "total": "Memory of the engine's GPU",
    }
    return {f"gpu_memory_{name}_bytes": (texts[name], value) for name, value in memory.items()}


def _counters(stats: Mapping[str, Any]) -> Values:
    prefix = stats["prefix_cache"]
    cache = stats["encoder_cache"]
    encoder = stats.get("encoder", {})
    host = stats["kv_offload"]
    block_bytes = stats.get("kv_bytes_per_block", 0)
    return {
        "steps": ("Steps of the engine", stats["steps"]),
        "preemptions": ("Requests that gave their blocks back and began again", stats["preemptions"]),
        "prefix_cache_queries": ("Prompt tokens looked up", prefix["queries"]),
        "prefix_cache_hits": ("Prompt tokens found", prefix["hits"]),
        "kv_offload_blocks_out": ("KV blocks copied to host memory", host["blocks_out"]),
        "kv_offload_bytes_out": ("Bytes copied to host memory", host["blocks_out"] * block_bytes),
        "kv_offload_blocks_in": ("KV blocks copied back to the device", host["blocks_in"]),
        "kv_offload_bytes_in": ("Bytes copied back to the device", host["blocks_in"] * block_bytes),
        "kv_offload_hits": ("Times that a request got blocks back from host memory", host["hits"]),
        "encoder_cache_queries": ("Pictures looked up", cache["hits"] + cache["misses"]),
        "encoder_cache_hits": ("Pictures found", cache["hits"]),
        "pictures_decoded": ("Pictures decoded", encoder.get("decoded", 0)),
        "pictures_encoded": ("Pictures encoded", encoder.get("encoded", 0)),
        "pictures_decoded_on_gpu": ("Pictures decoded by nvJPEG (--gpu-jpeg)", encoder.get("gpu_jpegs", 0)),
        "gpu_jpeg_fallbacks": (
            "Pictures meant for nvJPEG that were decoded on the CPU",
            encoder.get("gpu_jpeg_fallbacks", 0),
        ),
        "pictures_failed": ("Pictures that could not be decoded or encoded", encoder.get("failed", 0)),
    }


TIER_COUNTERS = {  # of host memory, a folder or a server, where embeddings are kept beside the device
    "hits": "Embeddings that a tier had",
    "misses": "Embeddings that a tier was asked for and had not",
    "read_bytes": "Bytes of embeddings read from a tier",
    "written_bytes": "Bytes of embeddings written to a tier",
    "evictions": "Embeddings that a tier evicted; a Valkey server counts its own",
    "ignored": "Damaged or foreign entries that were removed",
    "errors": "Reads and writes of a tier that failed or came late",
    "dropped": "Embeddings that a tier did not take: it was busy, or full of those in use",
}
TIER_GAUGES = {"used_bytes": "Bytes that a tier takes, about; 0 where only a server knows"}


def _tier_values(fields: Mapping[str, float]) -> tuple[Values, Values]:
    gauges, counters = (
        {f"embedding_tier_{name}": (text, fields[name]) for name, text in texts.items()}
        for texts in (TIER_GAUGES, TIER_COUNTERS)
    )
    return gauges, counters


def _event_counters(events: Mapping[str, int]) -> Values:
    missed = "Times that a reader of KV events was so slow that it misses some"
    return {
        "kv_event_batches": ("Batches of KV events published", events["batches"]),
        "kv_event_overflows": (missed, events["overflows"]),
        "kv_event_dropped": ("Batches of KV events that nothing could take", events["dropped"]),
    }


def _vllm_gauges(stats: Mapping[str, Any]) -> Values:
    values = {
        "num_requests_running": stats["running"],
        "num_requests_waiting": stats["waiting"],
        "kv_cache_usage_perc": stats["kv"]["used"] / stats["kv"]["total"],
    }
    return {name: ("As in vLLM", value) for name, value in values.items()}


def _vllm_counters(stats: Mapping[str, Any]) -> Values:
    encoder = stats["encoder_cache"]
    values = {
        "prefix_cache_queries": stats["prefix_cache"]["queries"],
        "prefix_cache_hits": stats["prefix_cache"]["hits"],
        "mm_cache_queries": encoder["hits"] + encoder["misses"],
        "mm_cache_hits": encoder["hits"],
        "num_preemptions": stats["preemptions"],
    }
    return {name: ("As in vLLM", value) for name, value in values.items()}


def _status_values(status: EngineStatus) -> tuple[Values, Values]:
    """One replica is up, where there are several, and all their restarts count."""
    up = ("1 while the engine works, also while it drains", status.state in ("ready", "draining"))
    return {"engine_up": up}, {"engine_restarts": ("Restarts of the engine", status.restarts)}


def _state_gauges(view: ReplicaView) -> Values:
    return {
        "replica_ready": ("1 where a replica takes requests", view.status.state == "ready"),
        "replica_queued_work": ("Work sent to a replica and not done, in prompt tokens", view.queued_work),
    }


def _state_counters(view: ReplicaView) -> Values:
    return {"replica_restarts": ("Restarts of a replica", view.status.restarts)}


REMOTE_COUNTERS = {  # of an engine with encoder workers
    "encoded": "Pictures that encoder workers encoded",
    "fallbacks": "Pictures encoded in the engine although there are encoder workers",
    "lost": "Pictures in an encoder worker when it died",
    "late": "Pictures that an encoder worker did not encode in time",
    "wrong": "Embeddings from an encoder worker that had another size than the bill",
    "quarantined": "Pictures that two encoder workers died of",
    "refused": "Times that such a picture was sent again",
}


def _remote_counters(fields: Mapping[str, float]) -> Values:
    return {f"remote_encoder_{name}": (text, fields[name]) for name, text in REMOTE_COUNTERS.items()}


def _encoder_values(view: EncoderView) -> tuple[Values, Values]:
    gauges: Values = {
        "encoder_up": ("1 where an encoder worker takes pictures", view.status.state == "ready"),
        "encoder_queue": ("Pictures that an encoder worker has", view.queue),
    }
    counters: Values = {
        "encoder_encoded": ("Pictures that an encoder worker encoded", view.encoded),
        "encoder_restarts": ("Restarts of an encoder worker", view.status.restarts),
    }
    return gauges, counters
