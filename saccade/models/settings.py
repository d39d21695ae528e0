"""Where layers find `setting`."""

from saccade.checkpoint.settings import setting

__all__ = ["setting"]
