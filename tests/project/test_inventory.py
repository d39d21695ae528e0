"""docs/design/security.md lists every place where a client can make the server work, with a test for each."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

from saccade.options.server import ServerOptions
from saccade.server.app import create_app
from saccade.server.turns import Work

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "saccade"
NOT_SERVED = (
    "apps/bench",
    "apps/evaluation",
    "apps/plan",
    "cli",
    "kernels",
    "models",
    "async_llm.py",
)  # no client of a server comes here
POOLS = {"FairPool", "ThreadPoolExecutor", "HelperProcess", "Popen", "to_thread"}


@cache
def section() -> str:
    page = (PROJECT / "docs" / "design" / "security.md").read_text()
    return page.partition("## What a client can make the server work\n")[2].partition("\n## ")[0]


def rows(first: str) -> list[list[str]]:
    """Cells of the table whose first column has this name."""
    table = section().partition(f"| {first} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def named_tests() -> dict[str, str]:
    """By letter."""
    return dict(re.findall(r"^- (\w): `(tests/[^`]+)`$", section(), re.MULTILINE))


def called(path: Path) -> set[str]:
    """The names of what a file calls."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {getattr(call, "attr", "") or getattr(call, "id", "") for call in calls}


def test_every_route_is_listed_and_no_other() -> None:
    service = MagicMock()
    service.server = ServerOptions(operator_routes=True)
    routes = {getattr(route, "path", "") for route in create_app(service).routes}
    assert set().union(*(named(row[0]) for row in rows("routes"))) == routes


def test_what_routes_bring_is_a_row_of_its_own() -> None:
    brought = {work for row in rows("routes") for work in row[1].split(", ")}
    assert brought | {"own", "start", "readers", "encoders"} == {row[0] for row in rows("work")}


def test_every_kind_of_turns_is_listed() -> None:
    names = {row[0] for row in rows("work")} | {"prompts"}
    assert "`server/turns.py` (prompts)" in section()
    assert {work.value for work in Work} <= names


def test_every_pool_and_every_process_is_listed_and_is_there() -> None:
    listed = {name for row in rows("work") for name in named(row[1])}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        is_served = not name.startswith(NOT_SERVED)
        if is_served and (POOLS & called(path) or '__name__ == "__main__"' in path.read_text()):
            assert name in listed, f"{name} starts threads or a process: add it to docs/design/security.md"
    assert not [name for name in listed if not (PACKAGE / name).is_file()]


def test_every_kind_of_work_has_a_test_that_exists() -> None:
    by_letter = named_tests()
    used = {letter for row in rows("work") for letter in row[4].split()}
    assert all(row[4] for row in rows("work")) and used == set(by_letter)
    for name in by_letter.values():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (PROJECT / file).read_text(), name
