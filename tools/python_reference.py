"""Writes docs/python.md, the reference of the Python interface, from signatures, docstrings and comments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parent.parent
PUBLIC = (  # file of saccade/ -> its classes, in the order in which a reader needs them
    ("llm.py", ("LLM",)),
    ("async_llm.py", ("AsyncLLM",)),
    ("sampling_params.py", ("SamplingParams", "StructuredOutputsParams", "BeamSearchParams")),
    ("outputs.py", ("RequestOutput", "CompletionOutput", "Logprob", "BeamSearchOutput", "BeamSearchSequence")),
    ("types/bill.py", ("Bill", "BillItem")),
    ("errors.py", ("RequestError", "ConfigError")),
)
_INTRO = """\
# Python

`from saccade import LLM, SamplingParams`: what is named here is exported by `saccade` or comes back from its
calls, and stays. Options of `LLM(...)` are those of the command line ([options.md](options.md)); vLLM's names for
them work too ([coming_from_vllm.md](coming_from_vllm.md)).
"""


def python_page(note: str) -> str:
    parts = [_INTRO + "\n" + note]
    for file, names in PUBLIC:
        path = ROOT / "saccade" / file
        if not path.exists():
            continue
        source = path.read_text("utf-8")
        classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
        parts += [_class_text(classes[name], source.splitlines()) for name in names]
    return "\n\n".join(parts) + "\n"


def _class_text(node: ast.ClassDef, lines: list[str]) -> str:
    parts = [f"## `{node.name}`"]
    if doc := ast.get_docstring(node):
        parts.append(_paragraphs(doc))
    if fields := list(_fields(node, lines)):
        parts.append("\n".join(["| field | type | default | |", "| --- | --- | --- | --- |", *fields]))
    methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    parts += [_method_text(method) for method in methods if not method.name.startswith("_")]
    return "\n\n".join(parts)


def _fields(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            comment = lines[item.end_lineno - 1].partition("  # ")[2] if item.end_lineno else ""
            cells = (item.target.id, ast.unparse(item.annotation), _default(item.value))
            codes = [f"`{cell}`".replace("|", "\\|") if cell else "" for cell in cells]
            yield f"| {' | '.join(codes)} | {comment.replace('|', chr(92) + '|')} |"


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    if isinstance(value, ast.Call):  # field(default_factory=tuple)
        return "".join(
            f"{ast.unparse(keyword.value)}()" for keyword in value.keywords if keyword.arg == "default_factory"
        )
    return ast.unparse(value)


def _method_text(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = [ast.unparse(decorator) for decorator in method.decorator_list]
    if "property" in decorators:
        head = f"`{method.name}`"
        if method.returns:
            head += f": `{ast.unparse(method.returns)}`"
    else:
        head = f"```python\n{_signature(method)}\n```"
    return "\n\n".join(filter(None, [head, _paragraphs(ast.get_docstring(method) or "")]))


def _signature(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """In one line, or with a line for each argument."""
    word = "async " if isinstance(method, ast.AsyncFunctionDef) else ""
    returned = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    arguments = list(_arguments(method.args))
    line = f"{word}{method.name}({', '.join(arguments)}){returned}"
    if len(line) <= 110:
        return line
    return "\n".join([f"{word}{method.name}(", *(f"    {each}," for each in arguments), f"){returned}"])


def _arguments(args: ast.arguments) -> Iterator[str]:
    """Without `self`."""
    without_default = len(args.args) - len(args.defaults)
    for argument, default in zip(args.args[1:], [*[None] * without_default, *args.defaults][1:], strict=True):
        yield _argument(argument, default)
    if args.kwonlyargs:
        yield "*"
    yield from map(_argument, args.kwonlyargs, args.kw_defaults)
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    return f"{ast.unparse(argument)} = {ast.unparse(default)}"


def _paragraphs(doc: str) -> str:
    """Examples stay as they are, the rest is filled."""
    blocks = []
    for block in doc.split("\n\n"):
        if block.startswith(">>>"):
            blocks.append(f"```python\n{block}\n```")
        else:
            blocks.append(fill(block, 138, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(blocks)
