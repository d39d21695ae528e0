"""Libraries that take a second to import: a worker that runs no test of theirs does without."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """A module that is imported when something of it is used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for its marks
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
