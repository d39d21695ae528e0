"""Where the tiles of a Hopper GEMM begin, computed one by one."""

from __future__ import annotations

from types import SimpleNamespace

from saccade.kernels.gemm import hopper_act, hopper_mainloop

PROGRAMS = 132
QUICK, GATED = hopper_act.ACTS.index("quick_gelu"), hopper_act.ACTS.index("silu_and_mul")


def tile_start(unit: int, rows: int, outputs: int, whole: int, wide: int, act: int) -> list[int]:
    """The kernel's own function, with integers in place of what it sees on a device."""
    shape = SimpleNamespace(M=rows, N=outputs, whole=whole)
    start = hopper_mainloop.tile_start.fn(unit, shape, wide, act == GATED)
    return [int(getattr(found, "value", found)) for found in start]
