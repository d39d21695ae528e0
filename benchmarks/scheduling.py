"""How long the scheduler thinks: schedule plus commit for many running requests, without a model.

`python -m benchmarks.scheduling` compares 1 to 1,000 tenants, each with requests that wait.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from saccade import SamplingParams
from saccade.media.hashing import identity
from saccade.options.engine import SchedulerConfig
from saccade.scheduler.scheduler import Scheduler
from saccade.types.prompt import Prompt
from saccade.types.request import Request, Tenant
from saccade.types.step import Sample, StepResult


def _request(index: int, tokens: int, tenant: Tenant) -> Request:
    ids = np.random.default_rng(index).integers(0, 30000, tokens)
    prompt = Prompt(ids.tolist(), (), (), np.arange(tokens, dtype=np.int32)[None], tokens, identity(ids, ()))
    return Request(str(index), prompt, SamplingParams(max_tokens=None), 2000, frozenset(), index, tenant)


def schedule_and_commit_ms(
    running: int, steps: int = 300, prompt_tokens: int = 500, queue: int = 0, tenants: int = 1
) -> float:
    """Median over decode steps, block boundaries and hashing included. `queue`: requests that wait."""
    limits = SchedulerConfig(
        max_model_len=4096, max_num_batched_tokens=10**6, max_num_seqs=running, block_size=16,
        num_blocks=running * 200, encoder_budget=4096, encoder_cache_slots=4096,
    )  # fmt: skip
    scheduler = Scheduler(limits)
    for index in range(running + queue):
        scheduler.add(_request(index, prompt_tokens, Tenant(str(index % tenants))), 0.0)
    times = []
    for step in range(steps + 1):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        result = StepResult({work.request_id: Sample(step % 1000, None) for work in plan.windows})
        resumed = time.perf_counter()
        scheduler.commit(plan, result, 0.0, 0.0)
        scheduler.index()
        times.append((time.perf_counter() - resumed + planned - start) * 1e3)
    return statistics.median(times[1:])  # the first step is the prefill


def main() -> None:
    """64 requests run and 1,000 wait, of more and more tenants."""
    base = 0.0
    for tenants in (1, 10, 100, 1000):
        rounds = [schedule_and_commit_ms(64, 200, 50, queue=1000, tenants=tenants) for _ in range(3)]
        base = base or min(rounds)
        print(f"{tenants:5} tenants: {min(rounds):.3f} ms, {min(rounds) / base:.2f} times that of one")


if __name__ == "__main__":
    main()
