"""Puts an engine core together from options and a checkpoint folder, and says what was chosen and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.config import ModelConfig, Options
from saccade.engine.core import EngineCore
from saccade.runner.build import build_runner
from saccade.runner.memory import plan_memory
from saccade.types import Geometry

logger = logging.getLogger("saccade.engine")


def build_core(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    largest: Geometry | None,
    *,
    progress: bool = True,
) -> EngineCore:
    """`largest` is the most expensive picture the limits allow: budget and cache are sized to hold it."""
    plan = plan_memory(options, config, largest)
    for reason in plan.reasons:
        logger.info("%s", reason)
    runner = build_runner(path, config, image_processor, options, plan, progress=progress)
    return EngineCore(plan.scheduler, runner)
