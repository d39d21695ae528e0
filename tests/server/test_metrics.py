"""Metrics: what is counted when, under which names, and that the dashboard asks for names that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from saccade import __version__
from saccade.engine.ipc.client import EngineStatus
from saccade.server.inter_token_latency import InterTokenLatency
from saccade.server.metrics import Finished, Metrics
from saccade.types.bill import Bill, BillItem
from saccade.types.events import Usage
from saccade.types.media import Grid
from tests.helpers.servers.serving import RunningServer, photo_part, text_part, until

STATS: dict[str, Any] = {
    "steps": 7,
    "running": 2,
    "waiting": 1,
    "preemptions": 3,
    "kv": {"total": 100, "used": 25, "idle": 5, "free": 70},
    "prefix_cache": {"queries": 40, "hits": 10, "evictions": 0},
    "kv_offload": {"total": 60, "used": 9, "blocks_out": 12, "blocks_in": 5, "hits": 2, "evictions": 3},
    "kv_bytes_per_block": 1000,
    "encoder_cache": {"slots_total": 50, "slots_used": 20, "hits": 4, "misses": 6},
    "encoder": {"decoded": 6, "encoded": 6, "failed": 1},
    "embedding_bytes_per_slot": 8,
}
IMAGE = BillItem("image", 640, 480, 644, 476, 391, 25, "abc", Grid(1, 34, 46))
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
ALERTS = Path(__file__).parents[2] / "deploy" / "alerts.yaml"


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def finished(*, has_media: bool) -> Finished:
    items = (IMAGE,) if has_media else ()
    usage = Usage(16, 0, arrived=1.0, first_scheduled=1.5, first_token=2.0, finished=3.0, decode_ms=20, encode_ms=30)
    return Finished(
        bills=[Bill(10, 391 * len(items), 0, 26, items)],
        usages=[usage],
        finish_reasons=["stop"],
        generated=[5],
        max_tokens=100,
        seconds=2.5,
        decode_seconds=1.0,
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny", lambda: STATS)


def test_a_finished_request_is_counted_by_reason_and_media(metrics: Metrics) -> None:
    metrics.finished(finished(has_media=True))
    metrics.finished(finished(has_media=False))
    found = samples(metrics)
    assert found["saccade:requests_total{finish_reason=stop,has_media=true}"] == 1
    assert found["saccade:requests_total{finish_reason=stop,has_media=false}"] == 1
    assert found["vllm:request_success_total{finished_reason=stop,model_name=tiny}"] == 2


def test_tokens_are_counted_by_kind(metrics: Metrics) -> None:
    metrics.finished(finished(has_media=True))
    found = samples(metrics)
    kinds = {kind: found[f"saccade:tokens_total{{kind={kind}}}"] for kind in ("text", "image", "cached", "generated")}
    assert kinds == {"text": 10, "image": 391, "cached": 16, "generated": 5}
    assert found["vllm:prompt_tokens_total{model_name=tiny}"] == 401
    assert found["vllm:generation_tokens_total{model_name=tiny}"] == 5


def test_every_stage_of_a_image_request_has_a_histogram(metrics: Metrics) -> None:
    metrics.finished(finished(has_media=True))
    metrics.fetched(0.25, 1000)
    found = samples(metrics)
    assert found["saccade:queue_seconds_sum"] == pytest.approx(0.5)
    assert found["saccade:prefill_seconds_sum"] == pytest.approx(0.5)
    assert found["saccade:media_decode_seconds_sum"] == pytest.approx(0.02)
    assert found["saccade:encode_seconds_sum"] == pytest.approx(0.03)
    assert found["saccade:media_fetch_seconds_sum{outcome=ok}"] == pytest.approx(0.25)


def test_a_text_request_adds_nothing_to_the_image_stages(metrics: Metrics) -> None:
    metrics.finished(finished(has_media=False))
    found = samples(metrics)
    assert found["saccade:media_decode_seconds_count"] == found["saccade:encode_seconds_count"] == 0


def test_latencies_are_split_by_media(metrics: Metrics) -> None:
    metrics.first_token(0.5, has_media=True)
    metrics.next_tokens(0.2, 2, has_media=False)
    found = samples(metrics)
    assert found["saccade:time_to_first_token_seconds_count{has_media=true}"] == 1
    assert found["saccade:inter_token_latency_seconds_count{has_media=false}"] == 2
    assert found["saccade:inter_token_latency_seconds_sum{has_media=false}"] == pytest.approx(0.2)
    assert found["vllm:time_to_first_token_seconds_count{model_name=tiny}"] == 1


def test_gauges_and_counters_of_the_engine_are_read_at_each_scrape(metrics: Metrics) -> None:
    found = samples(metrics)
    assert found["saccade:running"] == 2 and found["saccade:waiting"] == 1
    assert found["saccade:kv_blocks_used"] == 25 and found["saccade:kv_blocks_total"] == 100
    assert found["saccade:kv_offload_used_bytes"] == 9_000 and found["saccade:kv_offload_total_bytes"] == 60_000
    assert found["saccade:kv_offload_blocks_out_total"] == 12 and found["saccade:kv_offload_bytes_in_total"] == 5_000
    assert found["saccade:kv_offload_hits_total"] == 2
    assert found["saccade:encoder_cache_used_bytes"] == 160 and found["saccade:encoder_cache_total_bytes"] == 400
    assert found["saccade:encoder_cache_queries_total"] == 10 and found["saccade:pictures_decoded_total"] == 6
    assert found["vllm:kv_cache_usage_perc{model_name=tiny}"] == 0.25
    assert found["vllm:num_requests_waiting{model_name=tiny}"] == 1


def test_each_tier_of_embeddings_has_its_own_counts() -> None:
    names = ["hits", "misses", "read_bytes", "written_bytes", "evictions", "ignored", "errors", "dropped", "used_bytes"]
    tiers = {
        "host": {name: i for i, name in enumerate(names)},
        "folder": {name: 10 + i for i, name in enumerate(names)},
    }
    found = samples(Metrics("tiny", lambda: {**STATS, "embedding_tiers": tiers}))
    assert found["saccade:embedding_tier_hits_total{tier=host}"] == 0
    assert found["saccade:embedding_tier_misses_total{tier=folder}"] == 11
    assert found["saccade:embedding_tier_ignored_total{tier=host}"] == 5
    assert found["saccade:embedding_tier_used_bytes{tier=folder}"] == 18
    assert not any("embedding_tier" in name for name in samples(Metrics("tiny", lambda: STATS)))


def test_kv_events_are_counted_where_they_are_published() -> None:
    events = {"batches": 7, "overflows": 2, "dropped": 1}
    found = samples(Metrics("tiny", lambda: {**STATS, "kv_events": events}))
    assert {name: found[f"saccade:kv_event_{name}_total"] for name in events} == events
    assert not any("kv_event" in name for name in samples(Metrics("tiny", lambda: STATS)))


def test_before_the_engine_has_spoken_its_numbers_are_left_out() -> None:
    assert "saccade:running" not in samples(Metrics("tiny", dict))


def test_what_the_engine_counts_by_tenant_has_its_label() -> None:
    stats = {
        "tenants": {
            "acme": {"running": 1, "waiting": 4, "service": 100.0},
            "other": {"running": 5, "waiting": 0, "service": 8.5},
        },
        "encoder_cache_tenants": {"acme": {"hits": 5, "misses": 2, "slots": 64}},
    }
    metrics = Metrics("tiny", lambda: {**STATS, **stats})
    found = samples(metrics)
    assert found["saccade:tenant_waiting{tenant=acme}"] == 4
    assert found["saccade:tenant_running{tenant=other}"] == 5
    assert found["saccade:tenant_service_total{tenant=other}"] == 8.5
    assert found["saccade:tenant_encoder_cache_hits_total{tenant=acme}"] == 5
    assert found["saccade:tenant_encoder_cache_slots{tenant=acme}"] == 64
    assert b"tenant" not in metrics.text(sees_tenants=False)


def test_refusals_and_failures_are_counted_by_reason(metrics: Metrics) -> None:
    metrics.refused("overloaded")
    metrics.failed("engine_unavailable")
    metrics.media_refused("image_too_large")
    found = samples(metrics)
    assert found["saccade:admission_rejected_total{reason=overloaded}"] == 1
    assert found["vllm:admission_rejections_total{model_name=tiny,reason=overloaded}"] == 1
    assert found["saccade:request_failures_total{reason=engine_unavailable}"] == 1
    assert found["saccade:media_rejected_total{code=image_too_large}"] == 1


def test_two_servers_in_one_process_do_not_share_counts(metrics: Metrics) -> None:
    other = Metrics("tiny", lambda: STATS)
    metrics.failed("x")
    assert "saccade:request_failures_total{reason=x}" not in samples(other)


def test_the_dashboard_and_the_alerts_ask_only_for_metrics_that_exist() -> None:
    metrics = Metrics("tiny", lambda: STATS, status=lambda: EngineStatus("ready", 0.0, 0, None, None))
    metrics.finished(finished(has_media=True))
    metrics.first_token(0.5, has_media=True)
    metrics.next_tokens(0.2, 2, has_media=True)
    metrics.fetched(0.1, 10)
    metrics.refused("overloaded")
    metrics.failed("x")
    metrics.media_refused("x")
    names = {name.partition("{")[0] for name in samples(metrics)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]
    used = {name for expr in asked for name in re.findall(r"\b(?:saccade:|process_)\w+", expr)}
    assert len(asked) > len(rules) > 0 and used <= names, used - names


def test_a_running_server_counts_a_image_request(server: RunningServer) -> None:
    def look() -> tuple[float, float]:
        return server.stats("saccade:encode_seconds_count"), server.stats("vllm:request_success_total")

    before = look()
    server.chat([photo_part(70, 70, seed=77), text_part("?")])
    assert look() == (before[0] + 1, before[1] + 1)


def test_a_line_of_throughput_is_logged_while_there_is_work(server: RunningServer) -> None:
    assert until(lambda: server.answers() and any("answer tokens/s" in line for line in server.log))


def test_gaps_between_tokens_are_counted_as_prometheus_own_histogram_counts_them() -> None:
    registry = CollectorRegistry()
    labels = ("has_media",)
    bounds = (0.001, 0.01, 1)
    name = "saccade:inter_token_latency_seconds"
    reference = Histogram(name, "One token to the next", labels, buckets=bounds, registry=registry)
    gaps = InterTokenLatency("m", bounds)
    for seconds, count, has_media in [(0.001, 1, False), (0.002, 3, False), (0.5, 2, True), (7.0, 1, True)]:
        gaps.observe(seconds, count, has_media=has_media)
        for _ in range(count):
            reference.labels("true" if has_media else "false").observe(seconds)
    ours = {(s.name, tuple(s.labels.items())): s.value for family in gaps.collect() for s in family.samples}
    theirs = {(s.name, tuple(s.labels.items())): s.value for family in registry.collect() for s in family.samples}
    for key, value in theirs.items():
        if not key[0].endswith("_created"):
            assert ours[key] == pytest.approx(value), key
    total = ours["vllm:inter_token_latency_seconds_count", (("model_name", "m"),)]
    assert total == 7


# --- for operators ------------------------------------------------------------------------------------------------


def test_the_build_the_engine_and_the_process_are_told() -> None:
    status = EngineStatus("restarting", 0.0, 2, "it died", None)
    stats = {**STATS, "resident_bytes": 5 << 20, "gpu_memory": {"used": 3, "total": 8}}
    found = samples(Metrics("tiny", lambda: stats, status=lambda: status))
    assert found[f"saccade:build_info{{version={__version__}}}"] == 1
    assert (found["saccade:engine_up"], found["saccade:engine_restarts_total"]) == (0, 2)
    assert found["saccade:engine_resident_bytes"] == 5 << 20
    assert (found["saccade:gpu_memory_used_bytes"], found["saccade:gpu_memory_total_bytes"]) == (3, 8)
    assert found["process_resident_memory_bytes"] > 1 << 20


def test_without_a_gpu_its_memory_is_left_out() -> None:
    assert not any("gpu_memory" in name for name in samples(Metrics("tiny", lambda: STATS)))


def test_the_engines_memory_is_measured(server: RunningServer) -> None:
    assert until(lambda: server.stats("saccade:engine_resident_bytes") > 10 << 20)
    assert server.stats("saccade:engine_up") == 1 and server.stats("saccade:engine_restarts_total") == 0
    assert server.get("/live").json() == {"status": "alive"}
