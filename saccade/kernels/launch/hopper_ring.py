"""What pipelined Hopper kernels share: the walk over a ring of stages. Knows no operands."""

from __future__ import annotations

from saccade.kernels.launch.gluon_compat import aggregate, gl, gluon


@aggregate
class Barriers:
    """mbarriers of a ring: one per stage that it is full, then one per stage that it is free; extra ones follow."""

    bars: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def full(self, stage: gl.tensor) -> gl.shared_memory_descriptor:
        return self.bars.index(stage)

    @gluon.jit
    def free(self, stage: gl.tensor) -> gl.shared_memory_descriptor:
        return self.bars.index(self.STAGES + stage)

    @gluon.jit
    def extra(self, which: gl.tensor) -> gl.shared_memory_descriptor:
        return self.bars.index(2 * self.STAGES + which)


@gluon.jit
def next_stage(stage: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> gl.tuple:
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def before_waiting(total: gl.tensor) -> gl.tensor:
    """The same sums of softmax weights, computed before whatever follows.

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
