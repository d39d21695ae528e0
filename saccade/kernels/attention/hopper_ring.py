"""Steps that attention kernels for Hopper GPUs share, in Gluon. Know a ring and sums of weights, no queries or keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def following(stage: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> gl.tuple:
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def before_waiting(total: gl.tensor) -> gl.tensor:
    """The same sums, and a promise that their weights exist before whatever follows.

    Without it the assembler moves the exponentials behind the wait for the products they are to be hidden by. Threads
    of a warp meet under a mask that only a negative sum could change, and there is none.
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
