"""Names of kernels' parameters: what Triton ignores or trips over in silence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import saccade.kernels

ROOT = Path(saccade.kernels.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TAKEN = {"params", "specialization", "options", "backend"}  # locals of the launcher that Triton 3.6 generates


def named_in_decorators(function: ast.FunctionDef) -> set[str]:
    calls = [decorator for decorator in function.decorator_list if isinstance(decorator, ast.Call)]
    lists = [keyword.value for call in calls for keyword in call.keywords if keyword.arg]
    return {node.value for value in lists for node in ast.walk(value) if isinstance(node, ast.Constant)}


def kernels_of(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [one for one in functions if any("jit" in ast.dump(decorator) for decorator in one.decorator_list)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_parameters(path: Path) -> None:
    for kernel in kernels_of(path):
        names = {argument.arg for argument in kernel.args.args}
        assert named_in_decorators(kernel) <= names, f"{kernel.name}: Triton ignores names that are no parameters"
        assert not names & TAKEN, f"{kernel.name}: a launch would get another value"
