"""What the decorators of kernels say of their parameters: Triton ignores a name that is none of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import saccade.kernels

ROOT = Path(saccade.kernels.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def named_in_decorators(function: ast.FunctionDef) -> set[str]:
    calls = [decorator for decorator in function.decorator_list if isinstance(decorator, ast.Call)]
    lists = [keyword.value for call in calls for keyword in call.keywords if keyword.arg]
    return {node.value for value in lists for node in ast.walk(value) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_decorators_name_real_parameters(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            jitted = any("jit" in ast.dump(decorator) for decorator in node.decorator_list)
            if jitted:
                assert named_in_decorators(node) <= {argument.arg for argument in node.args.args}, node.name
