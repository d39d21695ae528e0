"""Plans for tests: a card, a GPU and a workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from saccade.apps.plan.calibration import calibration_for
from saccade.apps.plan.hardware import find_hardware
from saccade.apps.plan.model_cards import find_model
from saccade.apps.plan.planner import Deployment, DeploymentPlan, make_plan
from saccade.apps.plan.workload import SizeShare, Workload
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import Checkpoint
from saccade.types.media import Size


def sizes(*given: tuple[int, int]) -> tuple[SizeShare, ...]:
    return tuple(SizeShare(Size(*size), 1.0) for size in given)


def deployment(model: str = "Qwen/Qwen3-VL-8B", gpu: str = "h200", **given: Any) -> Deployment:
    """Arguments of `Workload`, of `Deployment` and, in `options`, of `Options`."""
    hardware = find_hardware(gpu)
    names = Workload.__dataclass_fields__
    workload = Workload(**{name: given.pop(name) for name in list(given) if name in names})
    options = Options(**given.pop("options", {}))
    return Deployment(find_model(model), hardware, calibration_for(hardware), workload, options, **given)


def planned(model: str = "Qwen/Qwen3-VL-8B", gpu: str = "h200", **given: Any) -> DeploymentPlan:
    return make_plan(deployment(model, gpu, **given))


def write_folder(checkpoint: Checkpoint, folder: Path) -> Path:
    """A card's settings as the files of a checkpoint."""
    folder.mkdir()
    files = {
        "config.json": checkpoint.config.raw,
        "preprocessor_config.json": checkpoint.image_processor,
        "video_preprocessor_config.json": checkpoint.video_processor,
        "processor_config.json": checkpoint.processor,
    }
    for name, values in files.items():
        if values:
            (folder / name).write_text(json.dumps(values))
    return folder
