"""Compiling ahead without a GPU: kernels are not launched, and PyTorch's operations inside a graph write nothing and
return garbage, as those of a graph that is never replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import GridExecutor

from saccade.kernels.launch import compile_ahead


class NotRun(TorchDispatchMode):
    """Operations that a graph only holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | (kwargs or {})
        written = [
            given[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info and argument.alias_info.is_write
        ]
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        found = func(*args, **(kwargs or {}))
        if any(returned.alias_info for returned in func._schema.returns):
            return found  # a view
        return tree_map_only(torch.Tensor, lambda made: made.fill_(math.nan if made.is_floating_point() else 0), found)


@contextmanager
def compiling_on_the_cpu() -> Iterator[list[str]]:
    """With what was recorded."""
    recorded = []

    def record(run: Callable[[], object]) -> None:
        with NotRun():
            run()
        recorded.append("a pass")

    with (
        patch("saccade.runner.cuda.graph_capture.record", record),
        patch("saccade.models.cuda.vision_graphs.record", record),
        patch.object(compile_ahead, "_now", compile_ahead._Ahead()),
        patch.object(GridExecutor, "__call__", lambda *_, **__: None),
        patch.object(torch.cuda, "graph_pool_handle", lambda: None),
        patch.object(torch.cuda, "synchronize", lambda _: None),
        patch.object(torch.cuda, "CUDAGraph", object),
    ):
        yield recorded
