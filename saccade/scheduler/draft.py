"""A plan in the making. Private to this package."""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.scheduler.budget import StepBudget
from saccade.types import Admission, ScheduledWindow


@dataclass(slots=True)
class StepBuilder:
    """What a step has so far, and what it may still take."""

    now: float
    budget: StepBudget
    windows: list[ScheduledWindow] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    has_preempted: bool = False
    answers_rest: bool = False  # requests that decode sit this step out
    ahead: frozenset[str] = frozenset()  # requests whose part of the step was planned ahead and runs already
    is_short: bool = False  # of blocks that only a preemption can give, and none may happen beside what runs
