"""An engine process that computes nothing, around the real scheduler: `python -m benchmarks.fake_engine FD`."""

from __future__ import annotations

import logging
import sys
from typing import Any

from saccade.engine.core import EngineCore
from saccade.engine.ipc.loop import run_process
from saccade.engine.ipc.messages import Start
from saccade.options.engine import SchedulerConfig
from saccade.types.step import MediaTimes, Sample, StepPlan, StepResult

LIMITS = SchedulerConfig(
    max_model_len=32_768,
    max_num_batched_tokens=8_192,
    max_num_seqs=128,
    block_size=16,
    num_blocks=20_000,
    encoder_budget=8_192,
    encoder_cache_slots=100_000,
)


class FakeRunner:
    """Computes nothing and says that all went well."""

    def __init__(self) -> None:
        self.encoded = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.encoded += len(plan.encode)
        samples = {window.request_id: Sample(7, None) for window in plan.windows if window.samples}
        return StepResult(samples, {item.key: MediaTimes(0.0, 0.0) for item in plan.encode})

    def stats(self) -> dict[str, Any]:
        return {"encoder": {"encoded": self.encoded}}

    def reset(self) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


def build(start: Start) -> EngineCore:
    return EngineCore(LIMITS, FakeRunner())


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    sys.exit(run_process(int(sys.argv[1]), build))
