"""Launches compiled kernels from a cache of our own: Triton's lookup costs the CPU several times the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_ALIGNED = 16  # bytes; kernels are compiled separately for addresses that are multiples
_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Tensor | float, ...],  # kernels are specialized on integers, not on floats
    sizes: tuple[object, ...],  # the constexpr arguments, which follow `args`
    **options: object,
) -> None:
    """`kernel[grid](*args, *sizes, **options)`."""
    key = (kernel, sizes, *options.values(), *map(_kind, args))
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*args, *sizes)
        return
    handle = kernel[grid](*args, *sizes, **options)
    if handle is not None:  # the interpreter returns None, and so does what only compiles
        _compiled[key] = handle


def launch_for_any_size(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[object, ...],
    like: Callable[[], tuple[object, ...]],  # arguments that it is compiled for
    key: tuple[object, ...],  # what these depend on
    sizes: tuple[object, ...],
    **options: object,
) -> None:
    """As `launch`, with a kernel that is compiled once for all sizes."""
    compiled = _compiled.get((kernel, sizes, *key))
    if compiled is None:
        compiled = kernel.warmup(*like(), *sizes, grid=(1,), **options)
        if compiled is None:
            return
        _compiled[(kernel, sizes, *key)] = compiled
    compiled[grid](*args, *sizes)


def _kind(argument: Tensor | float) -> object:
    """What a kernel is specialized on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.get_device(), argument.data_ptr() % _ALIGNED == 0
    return float if isinstance(argument, float) else argument
