"""Captures a pass as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from saccade.kernels.launch.compile_ahead import is_compiling, record


def capture(run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """In the memory of `pool`. It runs once before, which compiles its kernels and loads the libraries'.

    While kernels are compiled ahead it does not run, and the graph is empty.
    """
    graph = torch.cuda.CUDAGraph()
    if is_compiling():
        record(run)
        return graph
    run()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph
