"""Checks a file of results before the work whose results go there."""

from __future__ import annotations

import os
from pathlib import Path

from saccade.errors import ConfigError, reason_of


def check_plot(path: Path | None) -> None:
    if path is not None and path.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {path} is not an .svg file, and no other is drawn")


def check_writable(flag: str, path: Path) -> None:
    """Opens it: permissions alone do not tell. What was not there before is not there after."""
    is_new = not path.exists()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {reason_of(error)}") from None
    if is_new:
        path.unlink()
