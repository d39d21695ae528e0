"""Compiles the kernels of a model side by side, before its CUDA graphs are captured one after the other."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable

import torch

_MAX_PROCESSES = 32
logger = logging.getLogger(__name__)


def compile_kernels(device: torch.device, *passes: Callable[[], object]) -> None:
    """Each of `passes` captures CUDA graphs that are not kept. On a device without kernels none runs."""
    if device.type != "cuda":
        return
    from saccade.kernels.launch.compile_ahead import compiling  # needs Triton, which only CUDA machines have

    def compile_all() -> None:
        with compiling(min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)):
            for run in passes:
                _attempt(run)

    _attempt(compile_all)
    gc.collect()  # what was made for the passes
    torch.cuda.empty_cache()


def _attempt(run: Callable[[], object]) -> None:
    """A failure costs only time: what was not compiled here is when it is launched first."""
    try:
        run()
    except Exception as error:
        logger.warning("some kernels are compiled one after the other: %s: %s", type(error).__name__, error)
