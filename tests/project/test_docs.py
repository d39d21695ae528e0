"""The documentation: generated parts are fresh, links lead somewhere, pages keep to their sizes."""

from __future__ import annotations

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from benchmarks.results import write_rows
from saccade import __version__
from saccade.cli.main import _parse
from tools.docs import ROOT, first_sentence, stale_files, with_tables

EXPERIMENTS = ROOT / "docs" / "experiments"
# Tables of whole sentences, which may be wide.
GENERATED = {ROOT / "docs" / name for name in ("modules.md", "options.md", "metrics.md")}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WRITTEN = [page for page in PAGES if page not in GENERATED]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_generated_pages_and_tables_are_fresh() -> None:
    stale = [name_of(path) for path in stale_files()]
    assert not stale, f"run `python -m tools.docs`: {', '.join(stale)}"


def test_only_what_stands_between_markers_is_replaced() -> None:
    text = "a\n<!-- generated: x -->\nold\n<!-- end of generated: x -->\nb\n"
    assert with_tables(text, {"x": "new"}) == text.replace("old", "new")


def test_a_marker_of_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="y"):
        with_tables("<!-- generated: y -->\n<!-- end of generated: y -->", {})


def test_a_benchmark_writes_its_rows_with_the_commit(tmp_path: Path) -> None:
    write_rows(str(tmp_path / "cpu.json"), [("times sequential", 2.640001, ">= 2.5")])
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert found["rows"] == [{"name": "times sequential", "value": 2.64, "goal": ">= 2.5"}]
    assert found["commit"]


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@cache
def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))
    titles = (title.strip().lower() for title in re.findall(r"(?m)^#+ (.*)$", text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_lead_to_headings() -> None:
    for page in PAGES:
        for file, anchor in re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", page.read_text("utf-8")):
            target = (page.parent / file).resolve() if file else page
            assert anchor in anchors(target), f"{name_of(page)} links to {file}#{anchor}"


def commands(page: Path) -> list[str]:
    """Whole commands of `saccade` in the blocks of a page."""
    blocks = re.findall(r"(?ms)^```(?:sh)?\n(.*?)^```$", page.read_text("utf-8"))
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    found = [re.match(r"(?:\$ |\w+=\S+ )*(?:\.venv/bin/)?saccade ([^#|>&]*)", line) for line in lines]
    return [match[1] for match in found if match and "..." not in match[1] and "[" not in match[1]]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_have_flags_that_exist(page: Path) -> None:
    for command in commands(page):
        _parse(shlex.split(command))  # ends the program where it cannot be read


def test_every_benchmark_is_on_its_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    commands += [path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")]
    assert commands and not [name for name in commands if f"`{name}`" not in page]


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_benchmarks_that_a_page_runs_exist(page: Path) -> None:
    for name in re.findall(r"python -m benchmarks\.([a-z]\w*)", page.read_text("utf-8")):
        folder = ROOT / "benchmarks"
        assert (folder / f"{name}.py").exists() or (folder / name / "__main__.py").exists(), name


@pytest.mark.parametrize("path", sorted((ROOT / "saccade").rglob("__init__.py")), ids=name_of)
def test_a_package_says_in_a_sentence_what_is_in_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    assert re.fullmatch(r"\S.{8,160}\.", first_sentence(docstring)), docstring


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_lines_are_at_most_140_columns(page: Path) -> None:
    printed = r"(?s)<!-- (saccade \w+) -->.*?<!-- end of \1 -->"  # by a command, into the page
    text = re.sub(printed, "", page.read_text("utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 140, f"{name_of(page)}:{number} has {len(line)} columns"


def test_the_readme_is_short_and_begins_with_a_number_beside_vllm() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 110, f"README.md has {len(lines)} lines"
    assert re.search(r"\*\*\d+ ms; vLLM", "\n".join(lines[:6]))


def test_the_version_is_the_newest_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"(?m)^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", text)
    project = re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert project is not None
    assert versions[0] == __version__ == project[1]
    assert versions == sorted(versions, reverse=True)
    entries = re.split(r"(?m)^## ", text)[1:]
    assert not [entry.split()[0] for entry in entries if len(entry.splitlines()) > 50], "an entry fits on a screen"


@pytest.mark.parametrize("page", sorted(EXPERIMENTS.glob("[0-9]*.md")), ids=name_of)
def test_an_experiment_is_short_says_first_what_came_of_it_and_is_in_the_index(page: Path) -> None:
    text = page.read_text("utf-8")
    assert re.fullmatch(r"\d{3}-[a-z0-9-]+\.md", page.name)
    assert text.startswith(f"# {page.name[:3]}: ")
    assert len(text.splitlines()) <= 60
    for part in ("**Question.**", "**Decision.**"):
        assert part in text, f"{page.name} has no {part}"
    first = text.partition("\n")[2].partition("**Question.**")[0].strip()
    assert first, f"{page.name} does not begin with a plain sentence of what was tried and what came of it"
    assert first[0] not in "#*|-!", f"{page.name} begins with something else than a plain sentence"
    assert f"({page.name})" in (EXPERIMENTS / "README.md").read_text("utf-8")


def test_files_that_a_page_names_exist() -> None:
    """Python files in backticks, by the last parts of their paths."""
    folders = ("saccade", "tests", "benchmarks", "tools", "training", "examples")
    files = [f"/{name_of(path)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for page in WRITTEN:
        for path in re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text("utf-8")):
            assert any(file.endswith(f"/{path}") for file in files), f"{name_of(page)} names {path}"


def test_what_make_test_fast_names_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"tests/\S+", makefile.split("FAST :=")[1].split("\n\n")[0])
    assert named and [path for path in named if not (ROOT / path).exists()] == []
