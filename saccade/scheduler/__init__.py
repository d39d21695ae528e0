"""Decides what each step computes. Standard library only: no tensors, no pixels, no text, no clock of its own."""

from saccade.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
