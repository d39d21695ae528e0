"""Each counting rule beside its processor, with the zoo's small settings and with those of Transformers' classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.checkpoint import hf_config
from saccade.checkpoint.files import read_json
from saccade.checkpoint.plain_config import plain_words
from saccade.errors import ConfigError
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families.counting_rules import Rule
from tests.helpers.families.counting import NAMES, STANDING_IN, Pair, published, sizes
from tests.helpers.families.zoo import ZOO
from tests.helpers.families.zoo.stand_in_torchvision import provided

pytestmark = pytest.mark.conformance
_OF_PLANS = {"intermediate_size", "num_experts", "num_experts_per_tok", "num_local_experts", "rope_parameters"}


@pytest.fixture(scope="module", autouse=True)
def with_torchvision() -> Iterator[None]:
    with provided():
        yield


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, ZOO[request.param].build(tmp_path_factory.mktemp(request.param))


def test_a_rule_counts_as_its_processor(family: tuple[str, Path]) -> None:
    name, folder = family
    if name in STANDING_IN:
        with pytest.raises(ConfigError, match="has no counting rule"):
            Rule(open_checkpoint(str(folder), weights=False))
        return
    assert Pair.of(folder).differences(sizes(12, 11.0)) == []


def test_a_rule_counts_so_with_the_settings_of_classes(family: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = family
    pair = Pair.of(published(folder, name, tmp_path / "published"))
    tried = sizes(20, 12.5) if pair.runs.is_cheap else sizes(4, 11.0)
    assert pair.differences(tried) == []


def test_config_json_is_read_as_transformers_reads_it(family: tuple[str, Path]) -> None:
    _, folder = family
    raw = read_json(folder / "config.json")
    theirs, ours = hf_config.readable(folder, raw), plain_words(raw)
    for part in ("text_config", "vision_config"):
        read, plain = theirs.pop(part), ours.pop(part)
        names = read.keys() - _OF_PLANS
        assert {name: plain.get(name) for name in names} == {name: read[name] for name in names}
    assert ours == theirs
