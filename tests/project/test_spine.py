"""The reading path of docs/architecture.md is short, and all that it names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "architecture.md"
MAX_LINES = 3_000
_FILE = re.compile(r"`([\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?")  # with the names of what to read of it, if not all


def reading_path() -> Iterator[tuple[Path, list[str]]]:
    """Each file that the table names, and what to read of it; nothing: all."""
    table = PAGE.read_text("utf-8").partition("### Read it")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    for path, names in _FILE.findall("\n".join(rows)):
        yield PROJECT / "saccade" / path, re.findall(r"\w+", names)


def lines_to_read(path: Path, names: list[str]) -> int:
    source = path.read_text("utf-8")
    if not names:
        return len(source.splitlines())
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}
    return sum((nodes[name].end_lineno or 0) - nodes[name].lineno + 1 for name in names)


def test_the_reading_path_is_short() -> None:
    lines = {str(path): lines_to_read(path, names) for path, names in reading_path()}
    assert len(lines) == len(list(reading_path())) > 15
    assert sum(lines.values()) <= MAX_LINES, f"{sum(lines.values())} lines: {lines}"


def test_every_file_of_the_spine_is_there() -> None:
    spine = PAGE.read_text("utf-8").partition("## The spine")[2].partition("### Read it")[0]
    names = re.findall(r"`([\w/]+\.py)`", spine)
    assert len(names) > 12
    folders = [PROJECT / "saccade", PROJECT / "saccade" / "scheduler", PROJECT / "saccade" / "runner"]
    assert not [name for name in names if not any((folder / name).is_file() for folder in folders)]
