"""Families of the zoo answer as Transformers does, or are refused in one sentence that is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.errors import ConfigError
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.conformance.markdown import names_in
from tests.helpers.conformance.modes import compare
from tests.helpers.families.zoo import ZOO, second_half
from tests.helpers.families.zoo.wide import WIDE

pytestmark = pytest.mark.transformers

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
A_FEW = {  # one of each kind; all are in `make conformance`
    "gemma3": "pictures seen in both directions, windows",
    "gemma4@e2b": "embeddings for each layer, keys and values shared between layers",
    "glm4v": "RoPE positions on three axes",
    "lfm2_vl": "convolution states",
    "minicpmv4_6": "a number before each picture, delta nets",
    "paligemma": "prompts seen in both directions",
    "unlimited_ocr": "a window of the answer beside the prompt",
    "idefics2": "a processor that changes text around pictures",
    "blip": "no place for a picture in a prompt",
    "florence2": "an encoder and a decoder",
    "idefics": "pictures that layers attend across to",
}
SERVED = [name for name, entry in ZOO.items() if entry.refusal is None]
REFUSED = [name for name, entry in ZOO.items() if entry.refusal is not None]


def _case(name: str) -> object:
    return name if name in A_FEW else pytest.param(name, marks=pytest.mark.conformance)


@pytest.mark.parametrize("name", [_case(name) for name in SERVED])
def test_a_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    result = compare(name, ZOO[name], tmp_path)
    assert len(result.prompts) >= 3 and not result.differences


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gemma3", "compressed-fp8"),
        ("gemma3", "compressed-w4-32"),
        ("glm4v_moe", "fp8-blocks"),
        ("glm4v_moe", "gptq-order"),
        ("internvl", "awq"),
        ("internvl", "fp8-tensor"),
        ("internvl@glm", "modelopt-nvfp4"),
    ],
)
def test_a_quantised_family_answers_as_transformers_does_with_what_it_means(
    name: str, how: str, tmp_path: Path
) -> None:
    result = compare(name, WIDE[name], tmp_path, stored_as=how)
    assert len(result.prompts) >= 3 and not result.differences


def test_the_page_lists_every_family_of_the_zoo() -> None:
    assert names_in(PAGE) == ZOO.keys()
    readme = (PAGE.parents[1] / "README.md").read_text("utf-8")
    assert f"| others | {len(ZOO) - len(REFUSED)} more through Transformers" in readme


@pytest.mark.parametrize("name", [_case(name) for name in REFUSED])
def test_a_family_that_cannot_be_served_says_why(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    with second_half.libraries(name), pytest.raises(ConfigError) as error:
        open_checkpoint(str(entry.build(tmp_path)))
    said = str(error.value)
    assert said.startswith(f"model_type {name!r} is not in our table and cannot be served through Transformers: ")
    assert entry.refusal is not None and entry.refusal in said
    assert said.endswith("; docs/models.md lists what can be") and "\n" not in said
