"""Writes what a benchmark measured, for docs/results/ and the tables that `tools.docs` makes of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_json(file: str, record: Mapping[str, Any]) -> None:
    """With the commit it was measured at first."""
    Path(file).write_text(json.dumps({"commit": commit(), **record}, indent=2) + "\n", encoding="utf-8")


def write_rows(file: str, rows: Sequence[tuple[str, float, str]]) -> None:
    """The rows of a printed table: name, value, goal."""
    entries = [{"name": name, "value": round(value, 4), "goal": goal} for name, value, goal in rows]
    write_json(file, {"rows": entries})


def cell(value: float | None) -> str:
    """A number with three digits or so; nothing for None."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def commit() -> str:
    """Of the working tree, `+` where it has changes; `unknown` outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
