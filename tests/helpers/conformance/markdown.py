"""The list of families in docs/models.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.families.zoo import REFUSED

BEGIN = "<!-- families: python -m tests.helpers.conformance -->"
END = "<!-- end of families -->"
WIDTH = 140


def listed(equal: Iterable[str]) -> str:
    names = sorted(equal)
    by_sentence: dict[str, list[str]] = {}
    for name, sentence in sorted(REFUSED.items()):
        by_sentence.setdefault(sentence, []).append(name)
    served = f"Equal in all of these ways, {len(names)}: {quoted(names)}."
    rows = [f"| {quoted(those)} | {sentence} |" for sentence, those in by_sentence.items()]
    table = ["| refused | because |", "| --- | --- |", *rows]
    return "\n".join([*textwrap.wrap(served, WIDTH, break_on_hyphens=False), "", *table])


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def write(page: Path, equal: Iterable[str]) -> None:
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{listed(equal)}\n{END}{after}", "utf-8")


def names_in(page: Path) -> set[str]:
    """Families that the page lists."""
    inside = page.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    return set(inside.split("`")[1::2])
