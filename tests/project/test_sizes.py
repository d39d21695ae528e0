"""Functions fit on a screen and files have one job: no function has 50 lines, no file over 500."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
MAX_FUNCTION = 49  # lines, from `def` to the last; decorators do not count
MAX_FILE = 500
BUDGETS = {  # lines of a folder of saccade/; "": its own files. Raised only in a commit that says why
    "": 1_930,
    "apps": 5_520,
    "checkpoint": 3_270,
    "cli": 2_330,
    "engine": 5_000,
    "helpers": 520,
    "kernels": 12_610,
    "media": 3_800,
    "models": 13_200,
    "options": 1_300,
    "processor": 9_760,
    "runner": 8_820,
    "scheduler": 4_090,
    "server": 9_900,
    "structured": 1_450,
    "types": 620,
    "util": 420,
}


def long_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """Line, name and length of each function that is too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield node.lineno, node.name, length


@pytest.mark.parametrize("folder", ["saccade", "tests", "benchmarks", "tools"])
def test_no_function_has_50_lines(folder: str) -> None:
    files = sorted((PROJECT / folder).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(PROJECT)}:{line} `{name}` has {length} lines, {MAX_FUNCTION} are allowed: give one of its"
        " jobs to a function with a name (in a kernel a jit helper, which is inlined), its tables to constants"
        for path in files
        for line, name, length in long_functions(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["saccade", "tests", "tools"])
def test_no_file_has_over_500_lines(folder: str) -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in (PROJECT / folder).rglob("*.py")}
    found = [
        f"{path.relative_to(PROJECT)} has {length} lines, {MAX_FILE} are allowed: find a second job in it and move that"
        " to the file that it belongs to, or to one named after the job"
        for path, length in sorted(lengths.items())
        if length > MAX_FILE
    ]
    assert not found, "\n".join(found)


def test_folders_of_the_package_keep_their_budgets() -> None:
    lines = dict.fromkeys(BUDGETS, 0)
    for path in (PROJECT / "saccade").rglob("*.py"):
        folder = path.relative_to(PROJECT / "saccade").parts[0] if path.parent.name != "saccade" else ""
        lines[folder] += len(path.read_text("utf-8").splitlines())  # KeyError: a new folder needs a budget
    over = [f"saccade/{name} has {lines[name]} lines, {limit} are allowed" for name, limit in BUDGETS.items()]
    assert not [text for text, name in zip(over, BUDGETS, strict=True) if lines[name] > BUDGETS[name]]


def test_a_long_function_is_found_wherever_it_stands() -> None:
    method = "class A:\n    @staticmethod\n    async def f():\n" + "        x = 1\n" * (MAX_FUNCTION - 1)
    assert not list(long_functions(method))
    assert list(long_functions(method + "        x = 1\n")) == [(3, "f", MAX_FUNCTION + 1)]
