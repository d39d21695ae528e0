"""What else could be done, and what each would change: one thing at a time against the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from saccade import costs
from saccade.apps.plan.planner import Deployment, DeploymentPlan, make_plan, restore_seconds
from saccade.apps.plan.workload import is_fixed_size, max_resized_pixels
from saccade.errors import ConfigError

_CHECK = "check accuracy with saccade eval"
_CACHE_TIMES = 4  # the encoder cache
_DISK_GB_S = 0.8  # 4.8 MB in 5.9 ms (docs/experiments/040)
_STORE_GB_S = 2.5  # a Valkey server over 25 Gb/s, most of it


@dataclass(frozen=True, slots=True)
class Alternative:
    name: str
    plan: DeploymentPlan | None  # None: it cannot be had
    gain: float | None  # requests/s of a GPU, times those of the plan
    note: str = ""


def alternatives(plan: DeploymentPlan) -> list[Alternative]:
    return [_weighed(plan, name, changed, note) for name, changed, note in _changes(plan)]


def _weighed(plan: DeploymentPlan, name: str, changed: Deployment | None, note: str) -> Alternative:
    if changed is None:
        return Alternative(name, None, None, note)
    try:
        other = make_plan(changed)
    except ConfigError as error:
        return Alternative(name, None, None, str(error))
    gain = other.rate_per_gpu / plan.rate_per_gpu if plan.rate_per_gpu else None
    return Alternative(name, other, gain, note)


def _changes(plan: DeploymentPlan) -> Iterator[tuple[str, Deployment | None, str]]:
    deployment = plan.deployment
    if plan.cost.num_images:
        yield _half_pixels(plan)
    if not deployment.hardware.is_cpu:
        if not (deployment.fp8_params or deployment.int4):
            yield "--quantization fp8", _with_options(deployment, quantization="fp8"), _CHECK
        if deployment.kv_dtype != costs.FP8:
            yield "--kv-cache-dtype fp8", _with_options(deployment, kv_cache_dtype="fp8"), _CHECK
    if plan.cost.num_images:
        yield from _embeddings(plan)


def _half_pixels(plan: DeploymentPlan) -> tuple[str, Deployment | None, str]:
    deployment = plan.deployment
    pixels = max_resized_pixels(plan.cost.images) // 2
    name = f"--max-pixels {pixels}"
    if is_fixed_size(deployment.checkpoint, deployment.options):
        return name, None, "no effect: every image costs the same in this model"
    lowest = deployment.options.min_pixels
    smaller = _with_options(deployment, max_pixels=pixels, min_pixels=lowest and min(lowest, pixels))
    return name, smaller, "half of the largest image; check accuracy with saccade tune"


def _with_options(deployment: Deployment, **changes: Any) -> Deployment:
    return replace(deployment, options=replace(deployment.options, **changes))


def _embeddings(plan: DeploymentPlan) -> Iterator[tuple[str, Deployment | None, str]]:
    deployment = plan.deployment
    repeats = "" if deployment.workload.repeated else "helps only repeated images: see --repeated"
    scheduler = plan.capacity.scheduler
    size = round(_CACHE_TIMES * scheduler.encoder_cache_slots * scheduler.slot_bytes / costs.GIB, 1)
    yield f"--encoder-cache-gb {size:g}", _with_options(deployment, encoder_cache_gb=size), repeats
    yield "--encoders apart", replace(deployment, encoders_apart=True), "counts the GPUs that only encode"
    for name, speed in (("--embedding-dir (disk)", _DISK_GB_S), ("--embedding-store (25 Gb/s)", _STORE_GB_S)):
        changed = replace(deployment, store_gb_s=speed)
        ms = restore_seconds(changed, plan.cost) * 1e3
        each = plan.first_token.encode / plan.cost.num_images
        note = f"{ms:.1f} ms an image against {each:.1f} of encoding"
        yield name, changed, f"{note}: slower, not used" if ms >= each else repeats or note
