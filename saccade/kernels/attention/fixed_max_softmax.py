"""Softmax with a fixed level, for prefill and vision attention on Hopper GPUs, in Gluon. Knows no queries or keys.

Weights are powers of two relative to a level that the first tile fixes: no running maximum, no rescaling of the
accumulator. If the weights of a row overflow all the same, the program starts over with a running maximum.
"""

from __future__ import annotations

from saccade.kernels.launch.gluon_compat import gl, gluon, mbarrier
from saccade.kernels.launch.hopper_pipeline import Barriers

HEADROOM = gl.constexpr(32.0)  # the level is so many powers of two above the maximum of the first tile
_MAX_TOTAL = gl.constexpr(2.0**90)  # larger sums of weights may have overflowed
CHECKED = gl.constexpr(0)  # the extra barrier: all groups have said whether their weights overflowed


@gluon.jit
def report_overflow(bars: Barriers, overflowed: gl.shared_memory_descriptor, total: gl.tensor) -> None:
    """total [64]: the sums of weights of a group of rows."""
    if gl.max(total, 0) > _MAX_TOTAL:
        overflowed.store(gl.full([128], 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(bars.extra(CHECKED), count=1)


@gluon.jit
def has_overflowed(bars: Barriers, overflowed: gl.shared_memory_descriptor, WARPS: gl.constexpr) -> gl.tensor:
    """Whether the weights of any group did, once all have reported."""
    mbarrier.wait(bars.extra(CHECKED), 0)
    return gl.max(overflowed.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0) > 0


@gluon.jit
def follow_maximum(scores: gl.tensor, scale: gl.tensor, level: gl.tensor, total: gl.tensor) -> gl.tuple:
    """The level as a running maximum [64], the factor of what was summed before, and the sums of weights times it."""
    larger = gl.maximum(level, gl.max(scores, 1) * scale)
    shrink = gl.exp2(level - larger)
    return larger, shrink, total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def partial_sums(weights: gl.tensor) -> gl.tensor:
    """[64, keys] -> [64, 8]: what a thread can add up alone, without a shuffle in every tile."""
    return gl.sum(gl.reshape(weights, [64, weights.shape[1] // 8, 8]), 1)


@gluon.jit
def before_waiting(total: gl.tensor) -> gl.tensor:
    """The same sums of weights, computed before whatever follows.

    Without it ptxas moves the exponentials after the wait for the WGMMA that is to hide them. The threads of a warp
    synchronize under a mask that only a negative sum could change, and there is none.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 sum; .reg .b32 mask; .reg .pred never;
        add.f32 sum, $4, $5; add.f32 sum, sum, $6; add.f32 sum, sum, $7;
        setp.lt.f32 never, sum, 0f00000000; selp.b32 mask, 1, 0xffffffff, never; bar.warp.sync mask;
        mov.f32 $0, $4; mov.f32 $1, $5; mov.f32 $2, $6; mov.f32 $3, $7;
        }""",
        "=f,=f,=f,=f,f,f,f,f", [total], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip
