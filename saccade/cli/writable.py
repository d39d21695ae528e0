"""Checks a file of results before the work whose results go there."""

from __future__ import annotations

from pathlib import Path

from saccade.errors import ConfigError


def check_writable(flag: str, path: Path) -> None:
    """By opening it: permissions alone do not tell. What was not there before is not there after."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror or error}") from None
    if is_new:
        path.unlink()
