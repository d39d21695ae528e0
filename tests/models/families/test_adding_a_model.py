"""docs/adding_a_model.md: its steps give a family that answers, and every family has all places that it names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks import checkpoints
from saccade.apps.plan.model_cards import card_names, read_card
from saccade.checkpoint.defaults import TEXT_DEFAULTS, TOWER_DEFAULTS
from saccade.models.families import FAMILIES as MODELS
from saccade.processor.families import FAMILIES, TEMPLATES, VIDEO, name_of
from tests.helpers.families.conformance import ROWS
from tests.helpers.families.families import FAMILIES as CHECKPOINTS
from tests.helpers.families.family_text import KINDS
from tests.helpers.media.images import make_photo, png

pytestmark = pytest.mark.transformers

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adding_a_model.md").read_text("utf-8")
IN_TESTS = {"llava/pixtral": "pixtral", "qwen/qwen_visual": "qwen_vl"}
DEFAULTS = {**TEXT_DEFAULTS, **TOWER_DEFAULTS}
OLDER = {"deepseek_v2": {"num_hidden_layers": 30}}  # the class that DeepSeek published with its checkpoints
ONLY_INSIDE = {"ministral3"}  # the decoder of Ministral 3, which is not published alone
SACCADE = "from saccade.cli.main import main; main()"
QUESTION = """
import json, sys
from saccade import LLM, SamplingParams
folder, image = sys.argv[1:]
llm = LLM(model=folder, max_model_len=128, kv_cache_gb=0.01, use_tqdm=False)
prompt = {"prompt": "Look: <image> What is it?", "multi_modal_data": {"image": image}}
answer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
print(json.dumps(answer.outputs[0].token_ids))
"""


# --- the steps ----------------------------------------------------------------------------------------------------


def blocks() -> Iterator[tuple[str, str, str]]:
    """File, language and text of each block that is to be put into a file."""
    for sentence, language, text in re.findall(r"(?ms)^([^\n]+):\n\n```(json|python)\n(.*?)^```", PAGE):
        yield re.findall(r"`(saccade/[^`]+)`", sentence)[-1], language, text


def merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict):
        return new
    return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}


def put_into(file: Path, language: str, text: str) -> None:
    """A table of JSON is merged; an import goes above the others, a row first into `FAMILIES`."""
    old = file.read_text("utf-8")
    if language == "json":
        file.write_text(json.dumps(merged(json.loads(old), json.loads(text))))
        return
    for line in text.splitlines():
        above = r"(?m)^from saccade" if line.startswith("from") else r"(?m)(?<=^FAMILIES)(.*\{\n)"
        match = re.search(above, old)
        assert match, f"{file.name} has no place for {line}"
        at = match.start() if line.startswith("from") else match.end()
        old = f"{old[:at]}{line}\n{old[at:]}"
    file.write_text(old)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with the family of the page."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "saccade", root / "saccade")
    commands = re.findall(r"(?ms)^```sh\n(.*?)^```", PAGE)[0]
    subprocess.run(["sh", "-ec", commands], cwd=root, check=True)
    for file, language, text in blocks():
        put_into(root / file, language, text)
    return root


def run(root: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA's small checkpoint under the new name, without what the defaults say."""
    folder = checkpoints.llava(tmp_path_factory.mktemp("postcard"), layout="published")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "postcard"
    config["vision_config"]["model_type"] = "postcard_vision_model"
    for name in ("image_size", "patch_size", "hidden_act"):
        config["vision_config"].pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "photo.png").write_bytes(png(make_photo(112, 84)))
    return folder


def test_a_family_made_by_the_page_answers_as_the_one_that_it_copies(
    root: Path, folder: Path, llava_folder: Path
) -> None:
    photo = str(folder / "photo.png")
    expected = run(ROOT, "-c", QUESTION, str(llava_folder), photo)
    assert run(root, "-c", QUESTION, str(folder), photo) == expected
    assert len(json.loads(expected)) == 8


def test_a_family_made_by_the_page_is_counted_and_planned(root: Path, folder: Path) -> None:
    count = ["-c", SACCADE, "count", "--json", "--model", str(folder), str(folder / "photo.png")]
    assert json.loads(run(root, *count))[0]["tokens"] == 16
    plan = ["-c", SACCADE, "plan", "saccade/postcard-7b", "--gpu", "h200", "--json"]
    assert json.loads(run(root, *plan))["image_tokens"] == 16


def test_the_page_names_four_code_files() -> None:
    files = re.findall(r"(?m)^\| code \| `([^`]+)`", PAGE)
    assert len(files) == 4 and all(file.startswith("saccade/") for file in files)
    assert {file for file, _, _ in blocks()} <= {*files, *re.findall(r"(?m)^\| data \| `([^`]+)`", PAGE)}


# --- the places ---------------------------------------------------------------------------------------------------


def test_both_tables_have_the_same_families() -> None:
    assert FAMILIES.keys() == MODELS.keys()
    assert VIDEO.keys() <= FAMILIES.keys()
    assert TEMPLATES.keys() - FAMILIES.keys() == {"deepseek_ocr2", "unlimited_ocr"}, "bridged, without one of theirs"


def test_every_family_is_a_file_of_both_folders_or_shares_one() -> None:
    modules = {row.partition(".")[0] for row in MODELS.values()}
    files = {path.stem for path in (ROOT / "saccade/models/families").glob("[a-z]*.py")}
    assert modules == files - {"mllama_tower"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_card(name: str) -> None:
    assert name in ONLY_INSIDE | {name_of(read_card(card).config) for card in card_names()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_tested(name: str) -> None:
    test = IN_TESTS.get(name, name)
    assert test in KINDS or (test in ROWS and test in CHECKPOINTS) or f"{name}_vl" in ROWS  # by the same decoder


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_on_the_page_of_models(name: str) -> None:
    """In the first cell of a row of both tables."""
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    model_type, _, tower = name.partition("/")
    rows = [row for row in re.findall(r"(?m)^\| (.*?) \|", page) if f"`{model_type}`" in row]
    assert len([row for row in rows if not tower or f"`{model_type}` with" in row]) >= 2


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() - {"vision"}))  # the last is timm's
def test_defaults_are_those_of_transformers(name: str) -> None:
    theirs = {**AutoConfig.for_model(name).to_dict(), **OLDER.get(name, {})}
    assert {key: value for key, value in DEFAULTS[name].items() if theirs.get(key, value) != value} == {}
