"""Blocks of Triton's interpreter: made, indexed, loaded and stored without what their types have said already.

A load or store whose mask has the pointers' shape, or is broadcast to it, goes straight to memory. All others go the
interpreter's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

NO_SHAPE = tl.core.tuple([])
ONE = tl.core.constexpr(1)
_WHOLE = slice(None)


def block(data: Any, of_handle: Any, kind: Any, like: Any) -> Any:
    """A tensor of this kind with the shape of a block's type; of a scalar without one."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.__dict__ = {"data": data, "dtype": of_handle, "attr": {}}
    tensor = object.__new__(tl.core.tensor)
    if like is None:
        tensor.__dict__ = {"handle": handle, "type": kind, "dtype": kind, "shape": NO_SHAPE, "numel": ONE}
        return tensor
    of_block = like.with_element_ty(kind)
    shape = {"shape": of_block.of_tensor, "numel": of_block.numel_of_tensor}
    tensor.__dict__ = {"handle": handle, "type": of_block, "dtype": kind, **shape}
    return tensor


def _quick_index(own: Callable[..., Any]) -> Callable[..., Any]:
    """New axes of length one, as in `[:, None]`, are all that a block is indexed with."""

    def index(self: Any, slices: Any, **_: Any) -> Any:
        if type(slices) is not tuple or self.shape is NO_SHAPE:
            return own(self, slices)
        if not all(part is None or part == _WHOLE for part in slices):
            return own(self, slices)
        data = self.handle.data[slices]
        return block(data, self.handle.dtype, self.dtype, tl.core.block_type(self.dtype, list(data.shape)))

    return index


def _quick_to(own: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, kind: Any, *rest: Any, **how: Any) -> Any:
        return own(self, kind, *rest, **how) if rest or how or kind is not self.dtype else self

    return to


def _quick_load(own: Callable[..., Any]) -> Callable[..., Any]:
    def load(pointer: Any, mask: Any = None, other: Any = None, **how: Any) -> Any:
        kind = getattr(pointer.dtype, "element_ty", tl.int1)
        loaded = None if kind is tl.int1 else _mask(pointer, mask)
        value = other.value if type(other) is tl.core.constexpr else other or 0
        if loaded is None or type(value) not in (int, float) or (value and kind is not tl.float32):
            return own(pointer, mask, other, **how)
        pointers = pointer.handle.data
        stored = interpreter._get_np_dtype(kind)
        data = interpreter._interpreter.load(pointers, loaded, _filled(pointers.shape, stored, value), stored)
        return block(data, kind, kind, None if pointer.shape is NO_SHAPE else pointer.type)

    return load


def _quick_store(own: Callable[..., Any]) -> Callable[..., Any]:
    def store(pointer: Any, value: Any, mask: Any = None, **how: Any) -> None:
        kind = getattr(pointer.dtype, "element_ty", tl.int1)
        fits = type(value) is tl.core.tensor and value.dtype is kind and value.shape is pointer.shape
        stored = _mask(pointer, mask) if fits and kind is not tl.int1 and not pointer.dtype.const else None
        if stored is None:
            own(pointer, value, mask, **how)
        else:
            interpreter._interpreter.store(pointer.handle.data, value.handle.data, stored)

    return store


def _mask(pointer: Any, mask: Any) -> Any:
    """Of the pointers' shape; None where the interpreter has to look at it."""
    shape = pointer.handle.data.shape
    if mask is None:
        return _filled(shape, np.dtype(bool), True)
    if type(mask) is not tl.core.tensor or mask.dtype is not tl.int1:
        return None
    if mask.shape is pointer.shape:
        return mask.handle.data
    data = mask.handle.data
    is_broadcast = pointer.shape is not NO_SHAPE and np.broadcast_shapes(shape, data.shape) == shape
    return np.broadcast_to(data, shape) if is_broadcast else None


@lru_cache(4096)
def _filled(shape: tuple[int, ...], stored: Any, value: float) -> Any:
    return np.full(shape, value, stored)  # read only: never a result


QUICK = {"__getitem__": _quick_index, "to": _quick_to, "load": _quick_load, "store": _quick_store}
