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
