"""Triton's interpreter without the work that it repeats: the same results, sooner.

It patches `triton.language` at every launch and every call of a function inside a kernel. It builds a table of all
types each time it looks one up, and for every value a type with its name and shape. It unwraps, checks and converts
values that are as they should be. It computes each sum and product of integers a second time, in 64 bits, to see
whether they overflow.

One result is not the same: it converts FP8 wrongly in both directions. Here PyTorch does, as a GPU would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.helpers.kernels.interpreter_blocks import NO_SHAPE, ONE
from tests.helpers.kernels.interpreter_operators import quick


def hasten() -> None:
    interpreter._patch_builtin = _patching_known()
    interpreter._patch_lang = _patch_for_good(interpreter._patch_lang)
    interpreter.InterpretedFunction.__call__ = _call_rewritten
    interpreter._get_np_dtype = _find_once(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    tl.core.block_type.__init__ = _describe_once(tl.core.block_type.__init__)
    tl.core.block_type.with_element_ty = _with_element_ty
    tl.core.block_type.to_ir = lambda self, builder: self  # the interpreter has no types of its own
    tl.core.tensor.__init__ = _init_tensor
    tl.core._unwrap_if_constexpr = _unwrapping_less(tl.core._unwrap_if_constexpr)
    tl.core._normalize_cache_policy = lru_cache(tl.core._normalize_cache_policy)
    interpreter.TensorHandle.__init__ = _init_handle
    interpreter._convert_float = _converting_fp8(interpreter._convert_float)
    semantic = type(interpreter.interpreter_semantic)
    semantic.to_tensor = _tensor_as_it_is(semantic.to_tensor)
    semantic.cast = _casting_others(semantic.cast)
    semantic.broadcast_impl_value = _broadcast_unequal(semantic.broadcast_impl_value)


def _patching_known() -> Callable[[Any, Any, Any], None]:
    """Functions of the language without their `_semantic`, which is the interpreter's."""
    known: dict[int, dict[str, Any]] = {}  # by what has them, which is never freed

    def patch(target: Any, builder: Any, scope: Any) -> None:
        if id(target) not in known:
            found = {name: member for name, member in inspect.getmembers(target) if tl.core.is_builtin(member)}
            known[id(target)] = {name: _without_semantic(name, member) for name, member in found.items()}
        for name, function in known[id(target)].items():
            scope.set_attr(target, name, function)

    return patch


def _without_semantic(name: str, member: Any) -> Callable[..., Any]:
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    return quick(name, call)


def _patch_for_good(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The language stays as the first launch patched it: nothing else in a process of the interpreter uses it."""
    patched: set[str] = set()
    known: set[str] = set()  # modules of functions

    def patch_missing(fn: Any) -> Any:
        if fn.__module__ not in known:
            known.add(fn.__module__)
            modules = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
            if not modules <= patched:
                patch(fn)
                patched.update(modules)
        return interpreter._LangPatchScope()  # with nothing to restore

    return patch_missing


def _call_rewritten(self: Any, *args: Any, **named: Any) -> Any:
    """A function inside a kernel, which is rewritten once."""
    if "rewritten" not in vars(self):
        interpreter._patch_lang(self.fn)
        self.rewritten = self.rewrite()
    return self.rewritten(*args, **named)


_TYPES = {  # and how NumPy holds them
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}


def _converting_fp8(convert: Callable[..., Any]) -> Callable[..., Any]:
    def convert_as_torch(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (source.name, target.name):
            return convert(data, source, target, rounding)
        bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}"))
        found = bits.view(_TYPES[source.name][0]).to(_TYPES[target.name][0])
        return found.view(_TYPES[target.name][1]).numpy()

    return convert_as_torch


def _find_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def find_unknown(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return find_unknown


def _describe_once(describe: Callable[..., None]) -> Callable[..., None]:
    """A type of a block is what it was the last time that these elements and this shape came."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}  # one object for a shape, by which equal ones are known

    def describe_unknown(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in getattr(shape, "value", shape)]
        key = (element_ty.name, *sizes)
        if key not in known:
            describe(self, element_ty, shape)
            of_tensor = tl.core.tuple([tl.core.constexpr(size) for size in sizes])
            self.of_tensor = shapes.setdefault(tuple(sizes), of_tensor)
            self.numel_of_tensor = tl.core.constexpr(self.numel)
            self.with_other_elements = {}
            known[key] = vars(self)
        self.__dict__.update(known[key])

    return describe_unknown


def _with_element_ty(self: Any, scalar_ty: Any) -> Any:
    known = self.with_other_elements
    if scalar_ty.name not in known:
        known[scalar_ty.name] = tl.core.block_type(scalar_ty, self.shape)
    return known[scalar_ty.name]


_UNWRAPPED = {tl.core.tensor, tl.core.dtype, type(None), bool, int, float, str}


def _unwrapping_less(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unwrap_others(value: Any) -> Any:
        if type(value) in _UNWRAPPED:
            return value
        return value.value if type(value) is tl.core.constexpr else unwrap(value)

    return unwrap_others


def _casting_others(cast: Callable[..., Any]) -> Callable[..., Any]:
    def cast_unlike(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        return value if value.dtype is kind else cast(self, value, kind, rounding)

    return cast_unlike


def _tensor_as_it_is(to_tensor: Callable[..., Any]) -> Callable[..., Any]:
    def convert_others(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tl.core.tensor else to_tensor(self, value, check_type)

    return convert_others


def _init_handle(self: Any, data: Any, dtype: Any) -> None:
    self.data = data
    self.dtype = dtype
    self.attr = {}


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    is_block = type.is_block()
    self.shape = type.of_tensor if is_block else NO_SHAPE
    self.numel = type.numel_of_tensor if is_block else ONE


def _broadcast_unequal(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def splat(value: Any, like: Any) -> Any:
        data = value.handle.data
        handle = interpreter.TensorHandle(np.full(like.shape.values, data, data.dtype), value.handle.dtype.scalar)
        return tl.core.tensor(handle, like.with_element_ty(value.dtype))

    def broadcast_if_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        left = lhs.type
        right = rhs.type
        if left.is_block() != right.is_block():
            return (lhs, splat(rhs, left)) if left.is_block() else (splat(lhs, right), rhs)
        if not left.is_block() or left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_if_unequal
