"""GET /v1/engine: what the engine does right now, for people who watch it. Counts only; nothing of any request."""

from __future__ import annotations

from typing import Any

from saccade.server.service import Service


def engine_view(service: Service) -> dict[str, Any]:
    """Answers in every state, also before the engine is up: then there are no limits and no counters."""
    status, info, stats = service.engine.status(), service.engine.info, dict(service.engine.stats())
    return {
        "object": "engine",
        "model": service.names[0],
        "state": "draining" if service.gate.is_draining else status.state,
        "heartbeat_age_s": round(status.heartbeat_age, 3),
        "restarts": status.restarts,
        "open_requests": service.gate.num_open,
        "max_model_len": info.limits.max_model_len if info else None,
        "block_size": info.limits.block_size if info else None,
        "tokens": {"prompt": service.metrics.tokens_in, "answer": service.metrics.tokens_out},
        "recent_steps": stats.pop("recent_steps", []),
        "stats": stats,
    }
