"""Launches kernels without looking for them each time. Knows of what kind arguments are, not what they are for.

To find a compiled kernel by its arguments takes Triton's host code several times as long as to launch it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_ALIGNED = 16  # bytes; kernels are compiled apart for addresses that are multiples
_found: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Tensor | float, ...],  # floats are not compiled for, whole numbers are
    sizes: tuple[object, ...],  # what the kernel is compiled for; the arguments behind `args`
    **options: object,
) -> None:
    """`kernel[grid](*args, *sizes, **options)`."""
    key = (kernel, sizes, *options.values(), *map(_kind, args))
    found = _found.get(key)
    if found is not None:
        found[grid](*args, *sizes)
        return
    made = kernel[grid](*args, *sizes, **options)
    if made is not None:  # as the interpreter's result is
        _found[key] = made


def _kind(argument: Tensor | float) -> object:
    """All that decides which compiled kernel fits."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.get_device(), argument.data_ptr() % _ALIGNED == 0
    return float if isinstance(argument, float) else argument
