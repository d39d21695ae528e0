"""Operators of Triton's interpreter straight in NumPy, for operands that need no conversion: the same values and types.

The interpreter unwraps, promotes, converts and broadcasts both operands one by one. NumPy promotes int32 and int64 as
Triton does, and broadcasts by the same rules. All other operands go the interpreter's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from tests.helpers.kernels.interpreter_blocks import NO_SHAPE, QUICK, block

ARITHMETIC = {"__radd__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__rmul__": np.multiply}
COMPARISONS = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
BITWISE = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
DIVISION = {"__floordiv__": lambda left, right: (left - np.fmod(left, right)) // right, "__mod__": np.fmod}

_INTS = {"int32": (-(2**31), 2**31), "int64": (-(2**63), 2**63)}  # and what they hold
_OF_ARITHMETIC = {*_INTS, "fp32"}
_OF_BITWISE = {*_INTS, "int1"}


def quick(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language by its name; `own` is the interpreter's."""
    if name == "__add__":
        return _quick_add(own)
    if name in ARITHMETIC:
        return _quick_binary(own, ARITHMETIC[name], _OF_ARITHMETIC)
    if name in COMPARISONS:
        return _quick_binary(own, COMPARISONS[name], _OF_ARITHMETIC, is_comparison=True)
    if name in BITWISE:
        return _quick_binary(own, BITWISE[name], _OF_BITWISE)
    if name in DIVISION:
        return _quick_binary(own, DIVISION[name], set(_INTS))
    if name in QUICK:
        return QUICK[name](own)
    return _quick_binary(own, np.divide, {"fp32"}) if name == "__truediv__" else own


def _quick_binary(
    own: Callable[..., Any], compute: Callable[..., Any], kinds: set[str], *, is_comparison: bool = False
) -> Callable[..., Any]:
    def operate(self: Any, other: Any, **_: Any) -> Any:
        right = _operand(self.dtype, other)
        kind = self.dtype
        if right is None or kind.name not in kinds:
            return own(self, other)
        data = compute(self.handle.data, right)
        if type(other) is tl.core.tensor and other.dtype is tl.int64:
            kind = tl.int64
        return block(data, kind, tl.int1 if is_comparison else kind, _shape_of(self, other))

    return operate


def _quick_add(own: Callable[..., Any]) -> Callable[..., Any]:
    add_numbers = _quick_binary(own, np.add, _OF_ARITHMETIC)

    def add(self: Any, other: Any, **_: Any) -> Any:
        kind = self.dtype
        if type(kind) is not tl.core.pointer_type:
            return add_numbers(self, other)
        elements = _offset(other)
        if elements is None:
            return own(self, other)
        size = np.uint64(max(1, kind.element_ty.primitive_bitwidth // 8))
        data = self.handle.data + size * elements
        return block(data, self.handle.dtype, kind, _shape_of(self, other))

    return add


def _offset(other: Any) -> Any:
    """What is added to a pointer, in elements; None where the interpreter has to look at it."""
    if type(other) is tl.core.tensor:
        return other.handle.data.astype(np.uint64) if other.dtype.name in _INTS else None
    value = other.value if type(other) is tl.core.constexpr else other
    return np.uint64(value) if type(value) is int and 0 <= value < 2**31 else None


def _operand(kind: Any, other: Any) -> Any:
    """As NumPy takes it beside values of this kind; None where something has to be converted."""
    if type(other) is tl.core.tensor:
        if other.dtype is kind or (kind.name in _INTS and other.dtype.name in _INTS):
            return other.handle.data
        return None
    value = other.value if type(other) is tl.core.constexpr else other
    if kind is tl.float32:
        return value if type(value) is float or type(value) is int else None
    if kind.name in _INTS and type(value) is int:
        low, high = _INTS[kind.name]
        return value if low <= value < high else None
    return None


def _shape_of(left: Any, right: Any) -> Any:
    """The type of a block that has the result's shape; None for a scalar."""
    one = None if left.shape is NO_SHAPE else left.type
    if type(right) is not tl.core.tensor or right.shape is NO_SHAPE or right.shape is left.shape:
        return one
    if one is None:
        return right.type
    sizes = np.broadcast_shapes(left.handle.data.shape, right.handle.data.shape)
    return tl.core.block_type(right.dtype, list(sizes))
