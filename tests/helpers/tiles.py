"""Which tile of a GEMM is whose, computed one by one."""

from __future__ import annotations

from saccade.kernels.gemm import hopper_act, hopper_tiles

PROGRAMS = 132
QUICK, GATED = hopper_act.ACTS.index("quick_gelu"), hopper_act.ACTS.index("silu_and_mul")


def place(unit: int, shape: tuple[int, ...], wide: int, act: int) -> list[int]:
    """The kernel's own function, with numbers in place of what it sees on a device."""
    return [int(getattr(found, "value", found)) for found in hopper_tiles.place.fn(unit, shape, wide, act == GATED)]
