"""/v1/plan: what the served model would need and give on a GPU, and what was measured in the last hour."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from saccade.apps.plan.alternatives import alternatives
from saccade.apps.plan.calibration import calibration_for
from saccade.apps.plan.hardware import DEFAULT, PRESETS
from saccade.apps.plan.planner import Deployment, make_plan
from saccade.apps.plan.report import as_json
from saccade.errors import ConfigError
from saccade.server.http.request_context import Exchange
from saccade.server.pipeline import read_request
from saccade.server.request.plan import MAX_SIZES, PlanRequest, plan_error, read_plan
from saccade.server.service import Service
from saccade.server.turns import Work


async def plan(service: Service, exchange: Exchange) -> dict[str, Any]:
    """The JSON of `saccade plan --json`, for the served model with this server's options."""
    request = await read_request(service, read_plan, exchange, min(1, _max_images(service)))
    service.check_model(request.model)
    return await service.turns.take(Work.PLAN, exchange.caller, partial(_planned, service, request))


def _planned(service: Service, request: PlanRequest) -> dict[str, Any]:
    # Sizes chosen for this machine's memory say nothing of another's.
    options = replace(service.options, kv_cache_gb=None, kv_offload_gb=0.0)
    calibration = calibration_for(request.hardware)
    checkpoint = service.processor.checkpoint
    try:
        estimate = make_plan(Deployment(checkpoint, request.hardware, calibration, request.workload, options))
        figures = as_json(estimate, alternatives(estimate))
    except ConfigError as error:
        raise plan_error(error) from None
    return {**figures, "model": service.names[0]}  # the path of its folder is never shown


def plan_options(service: Service) -> dict[str, Any]:
    """What the page offers to choose from."""
    return {
        "object": "plan.options",
        "model": service.names[0],
        "gpus": [{"id": name, **asdict(gpu)} for name, gpu in PRESETS.items()],
        "default_gpu": "cpu" if service.options.device == "cpu" else DEFAULT,
        "max_sizes": MAX_SIZES,
        "max_images": _max_images(service),
    }


def _max_images(service: Service) -> int:
    """The limit of one request."""
    return service.options.limit_mm_per_prompt.get("image", 0) if service.processor.takes_images else 0


def measured(service: Service) -> dict[str, Any]:
    """Figures of all requests of all tenants together, as /metrics has them."""
    return {
        "object": "plan.measured",
        "model": service.names[0],
        **service.metrics.recent_hour.summary(),
    }
