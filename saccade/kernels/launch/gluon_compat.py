"""Gluon, Triton's experimental language for Hopper kernels, under one import for every Triton we support (3.6 on).

Kernels import Gluon from here, so a renamed path or function is followed in this file alone.
"""

from __future__ import annotations

from typing import TypeVar, cast, dataclass_transform, get_type_hints

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "TensorDescriptor", "aggregate", "barrier", "fence_async_shared", "gdc_launch_dependents", "gdc_wait", "gl",
    "gluon", "mbarrier", "reinterpret", "tma", "tma_load", "tma_store", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

_T = TypeVar("_T")

# The first name of each is that of Triton 3.7, the second that of 3.6.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret


@dataclass_transform()
def aggregate(cls: type[_T]) -> type[_T]:
    """A class whose instances hold named values inside a kernel; its fields are set by position."""
    if hasattr(gluon, "aggregate"):
        return cast(type[_T], gluon.aggregate(cls))
    fields = get_type_hints(cls)

    def init(self: object, *values: object) -> None:
        for name, value in zip(fields, values, strict=True):
            setattr(self, name, value if isinstance(value, core.base_value) else core.constexpr(value))

    init.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__annotations__ = fields  # Triton 3.6 wants classes, not their names, and a constructor
    cls.__init__ = init  # type: ignore[method-assign]
    return cast(type[_T], core._aggregate(cls))
