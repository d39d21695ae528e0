"""Decides what each step computes. Standard library only: no tensors, no pixels, no text, no clock."""

from saccade.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
