"""A class name means one class: a reader who meets it needs no import to know which."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "saccade"
FAMILIES = ("models/families/", "processor/families/")  # each has its own classes of the same names
SHARED = {"RayWorker", "Ring", "Sizes", "TileSchedule", "_Shared", "_Sizes"}
"""Names of two classes or more: kernels, and actors found by that name. The list may only become shorter."""


def classes_by_name() -> dict[str, list[str]]:
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(FAMILIES):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(name)
    return files


def test_outside_the_families_a_class_name_is_defined_once() -> None:
    several = {name: files for name, files in classes_by_name().items() if len(files) > 1 and name not in SHARED}
    assert not several, several
