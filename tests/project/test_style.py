"""Ceilings of how dense the code is and of participles for nouns; `python -m tools.style` shows where it stands."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tools.style import Density, density, folders, joined, places

PARTICIPLES = 3.0  # per 1,000 lines of the package
CEILINGS = {"conditional": 2.0, "boolean": 2.5}  # per 100 code lines, outside kernels
PARALLEL = 0.3  # everywhere


density_of = cache(density)


def all_but(*names: str) -> Density:
    return joined([density_of(folder) for folder in folders() if folder.name not in names])


def test_names_say_what_a_thing_is_not_what_happened_to_it() -> None:
    assert all_but().per_thousand_lines("participles") <= PARTICIPLES


@pytest.mark.parametrize(("kind", "ceiling"), CEILINGS.items())
def test_expressions_are_loose(kind: str, ceiling: float) -> None:
    assert all_but("kernels").per_hundred_code_lines(kind) <= ceiling


def test_assignments_are_one_by_one() -> None:
    assert all_but().per_hundred_code_lines("parallel") <= PARALLEL


def test_each_kind_of_place_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "dense.py"
    path.write_text("found = 1 if a and b else 2\nc, d = a, b\ndef f(given): ...\n")
    kinds = [place.kind for place in places(path)]
    assert sorted(kinds) == ["boolean", "conditional", "parallel", "participles", "participles"]
