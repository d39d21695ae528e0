"""How dense the code is and how it names things, by folder: `python -m tools.style [--list FOLDER]`.

tests/project/test_style.py holds the ceilings. `--list` shows each place in a folder.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent / "saccade"
_WORDS = """
added allowed answered asked asking begun billed chosen coming done ended found given gone held kept known left
lost made missing named needed opened others own rest said seen sent served shown some stored taken tried told
used waiting wanted written
"""
PARTICIPLES = frozenset(_WORDS.split())  # as nouns they say what happened to a thing instead of what it is
KINDS = ("participles", "conditional", "boolean", "parallel")
_TOKENS_WITHOUT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class Place(NamedTuple):
    kind: str
    path: Path
    line: int
    text: str


class Density(NamedTuple):
    lines: int
    code_lines: int
    counts: dict[str, int]  # by kind

    def per_thousand_lines(self, kind: str) -> float:
        return self.counts[kind] / max(1, self.lines) * 1000

    def per_hundred_code_lines(self, kind: str) -> float:
        return self.counts[kind] / max(1, self.code_lines) * 100


def places(path: Path) -> Iterator[Place]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PARTICIPLES:
            yield Place("participles", path, node.lineno, node.id)
        elif isinstance(node, ast.arg) and node.arg in PARTICIPLES:
            yield Place("participles", path, node.lineno, node.arg)
        elif isinstance(node, ast.IfExp):
            yield Place("conditional", path, node.lineno, ast.unparse(node))
        elif isinstance(node, ast.BoolOp):
            yield Place("boolean", path, node.lineno, ast.unparse(node))
        elif is_parallel(node):
            yield Place("parallel", path, node.lineno, ast.unparse(node))


def is_parallel(node: ast.AST) -> bool:
    """`a, b = c, d`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def code_lines(text: str) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _TOKENS_WITHOUT_CODE and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def density(folder: Path) -> Density:
    """Of a folder with what is below it; of the package's own files alone, for its root."""
    paths = folder.glob("*.py") if folder == ROOT else folder.rglob("*.py")
    counts = dict.fromkeys(KINDS, 0)
    lines = code = 0
    for path in paths:
        text = path.read_text("utf-8")
        lines += text.count("\n")
        code += code_lines(text)
        for place in places(path):
            counts[place.kind] += 1
    return Density(lines, code, counts)


def folders() -> list[Path]:
    return [ROOT, *sorted(path for path in ROOT.iterdir() if any(path.rglob("*.py")))]


def joined(densities: list[Density]) -> Density:
    counts = {kind: sum(each.counts[kind] for each in densities) for kind in KINDS}
    return Density(sum(each.lines for each in densities), sum(each.code_lines for each in densities), counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", metavar="FOLDER", help="a folder of saccade/ whose places are shown")
    args = parser.parse_args()
    if args.list:
        for path in sorted((ROOT / args.list).rglob("*.py")):
            for place in places(path):
                print(f"{place.path.relative_to(ROOT.parent)}:{place.line} {place.kind}: {place.text}")
        return
    print(
        f"{'folder':12} {'lines':>6} {'participles/1000':>17} {'cond./100':>10} {'bool./100':>10} {'parallel/100':>13}"
    )
    table = {str(folder.relative_to(ROOT)): density(folder) for folder in folders()}
    table["all"] = joined(list(table.values()))
    for name, each in table.items():
        cells = [f"{each.per_hundred_code_lines(kind):10.2f}" for kind in KINDS[1:]]
        print(f"{name:12} {each.lines:6} {each.per_thousand_lines('participles'):17.1f} {' '.join(cells)}")


if __name__ == "__main__":
    main()
