"""The field's words: identifiers, docstrings and comments of the package say what vLLM and the literature say."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "saccade"
FILES = sorted(ROOT.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})

# Words of an identifier, between underscores or capitals -> the field's word.
IDENTIFIERS = {
    "picture|pictures": "image",
    "multiprocessor|multiprocessors": "sm",
    "ride|rides|riding": "mixed, fused_with_decode",
    "foretell|foresee|foreseeable": "prefetch, known_ahead",
    "turned": "rotated, rope",
    "drawn|drawing": "sampled, sampling",
    "recorded|recording|recordings": "captured, graph",
    "product|products": "gemm",
    "lasting|looking": "cross_attended, cross_attention",
    "whoever|nobody|somebody|someone|anyone": "the request, the caller",
}
FIRST_WORDS = {"most": "max", "least": "min"}  # of an identifier
OF_OTHERS = {  # names of other libraries
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "most_common",
}
# A pattern for prose -> what to say.
PROSE = {
    r"whoever|whom|nobody|somebody|someone|anyone": "name the request, the caller, the process",
    r"(?<!operator )(?<!people )(?<!person )(?<!user )(?<!users )who": "which, that; `who` is for persons",
    r"multiprocessors?": "SM",
    r"second cache": "L2",
    r"at hand": "cached, resident, loaded",
    r"rid(?:e|es|ing)(?: along)?": "mixed batch, fused with the decode step",
    r"fore(?:tell|tells|told|see|sees|seen)": "prefetch, known in advance",
    r"(?:queries|keys|heads|q|k)(?: \w+){0,3} turned|turned (?:queries|keys|heads|by)": "rotated (RoPE)",
    r"draw(?:s|n|ing)? (?:\w+ )?tokens?|tokens? (?:\w+ ){0,2}drawn": "sample",
    r"record(?:ed|ing|ings)? (?:pass|passes|graphs?|sizes?|blocks?)|rehears\w+": "capture (CUDA graph), warm up",
    r"(?<!dot )(?<!inner )(?<!outer )products?": "GEMM, matmul, linear layer",
    r"(?:running|beside|open) answers?": "running decodes",
    r"behind(?! (?:a|the|its) proxy)": "after",
    r"rooms?": "capacity, space, memory",
    r"lasting|in sight": "cross-attention",
    r"plain (?:steps?|pass|passes|engine|forward|way|tower|decoder)": "eager, PyTorch",
}


Line = tuple[int, str]


def split(text: str) -> tuple[list[Line], list[Line]]:
    """Comments, and names that code uses, each with its line."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    kinds = (tokenize.COMMENT, tokenize.NAME)
    comments, names = ([(one.start[0], one.string) for one in tokens if one.type == kind] for kind in kinds)
    return comments, names


def docstrings(text: str) -> Iterator[Line]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for offset, line in enumerate((ast.get_docstring(node, clean=False) or "").splitlines()):
                yield node.body[0].lineno + offset, line


def parts_of(name: str) -> list[str]:
    """Words of an identifier: `max_tokens`, `MaxTokens` and `MAX_TOKENS` all have two."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


@cache
def words_for(name: str) -> list[str]:
    """What to say in place of words of an identifier."""
    parts = parts_of(name) if name not in OF_OTHERS else []
    words = [word for pattern, word in IDENTIFIERS.items() if any(re.fullmatch(pattern, part) for part in parts)]
    return [*words, FIRST_WORDS[parts[0]]] if parts and parts[0] in FIRST_WORDS else words


def against(path: Path) -> Iterator[str]:
    text, place = path.read_text("utf-8"), path.relative_to(ROOT)
    comments, names = split(text)
    for line, name in names:
        yield from (f"{place}:{line} `{name}`: say {word}" for word in words_for(name))
    for line, prose in (*comments, *docstrings(text)):
        for pattern, word in PROSE.items():
            for found in re.finditer(rf"\b(?:{pattern})\b", prose, re.IGNORECASE):
                yield f"{place}:{line} '{found[0]}': say {word}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT.parent)))
def test_a_folder_speaks_the_fields_words(folder: Path) -> None:
    files = [path for path in FILES if path.parent == folder]
    found = [line for path in files for line in against(path)]
    assert not found, "\n".join(found)
