"""How a config class declares an option, and how it checks one. Knows no option."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from saccade.errors import UsageError


def option(default: Any, help: str, *, is_secret: bool = False) -> Any:
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"help": help})
    return field(default=default, metadata={"help": help}, repr=not is_secret)


def defaults_of(cls: Any) -> dict[str, Any]:
    """The default of each option of a config class, by name."""
    return {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(cls)}


def positive(name: str, value: int) -> None:
    require(isinstance(value, int) and value >= 1, name, value, "a whole number of 1 or more")


def require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise UsageError(f"{name} must be {rule}, not {value!r}")
