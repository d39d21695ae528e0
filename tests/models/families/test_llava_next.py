"""LLaVA-NeXT: what a picture costs, how it is cut and what the tower makes of it, against Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.engine.ipc.messages import HEADER, Start, command_in, frame, start_message
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.processor.families.llava_next import LlavaNext
from saccade.types.media import Grid, Size
from tests.helpers.families import family_llava_next
from tests.helpers.families.conformance import ROWS
from tests.helpers.families.family_checks import Given, Subject, assert_close, dummy, edited, with_config
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

RULES = ROWS["llava_next"].rules  # of the checkpoints on the hub

PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2), make_photo(31, 33, 3), make_photo(300, 70, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_llava_next.build(tmp_path_factory.mktemp("llava_next"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder)


# --- what a picture costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(Size(672, 672), 576 + 48 * 49), (Size(1000, 1000), 2928), (Size(336, 672), 1776), (Size(640, 480), 2340)],
)
def test_worked_examples(size: Size, tokens: int) -> None:
    assert RULES.geometry(size, *RULES.policy(None, None)).tokens == tokens


def test_a_lower_limit_leaves_out_the_larger_pinpoints() -> None:
    limits = RULES.policy(None, 300_000)
    assert RULES.geometry(Size(672, 672), *limits).grid == Grid(3, 24, 24)
    assert RULES.geometry(Size(672, 672), *RULES.policy(None, 1)).grid == Grid(3, 24, 24)
    assert RULES.policy_tag(*limits) != RULES.policy_tag(*RULES.policy(None, None))


def test_a_tiling_travels_to_the_engines_process(subject: Subject) -> None:
    geometry = subject.geometry(PHOTOS[0])
    start = start_message(Path("."), subject.config, {}, Options(), geometry, [], progress=False)
    received = command_in(bytes(frame(start)[HEADER.size :]))
    assert isinstance(received, Start) and received.largest == geometry and geometry.tiling is not None


# --- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["llama", "qwen2"])
def test_other_decoders_match(tmp_path: Path, decoder: str) -> None:
    made = family_llava_next.build(tmp_path, decoder=decoder)
    text = "<image>\nwhat is it?"
    ours, theirs = Subject(made), family_llava_next.reference(made)
    assert_close(ours.logits(text, PHOTOS[:1]), theirs.logits(text, PHOTOS[:1]))


@pytest.mark.parametrize(
    "changes", [{"vision_feature_layer": -1}, {"vision_feature_layer": 2}, {"projector_hidden_act": "relu"}], ids=str
)
def test_features_are_taken_where_the_config_says(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = edited(family_llava_next.build(tmp_path), lambda raw: raw.update(changes))
    ours, theirs = Subject(made), family_llava_next.reference(made)
    with torch.inference_mode():
        features = theirs.model.get_image_features(**theirs.read(PHOTOS[:1])[0]).pooler_output
    assert_close(ours.embeddings(PHOTOS[:1])[0], features[0])


# --- what checkpoints say -----------------------------------------------------------------------------------------


def test_pinpoints_come_from_the_model_where_the_processor_is_silent(subject: Subject) -> None:
    family = LlavaNext.from_checkpoint(Given(subject.config))
    assert family.pinpoints == subject.family.pinpoints  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("image_processor", "said"),
    [
        ({"do_resize": False}, "do_resize=false"),
        ({"size": {"shortest_edge": 224}}, r"tiles of \[224\] pixels, but the vision tower takes 56"),
        ({"image_grid_pinpoints": [[56, 100]]}, r"\[56, 100\].*tiles of 56x56"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(subject: Subject, image_processor: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LlavaNext.from_checkpoint(Given(subject.config, image_processor))


def test_class_tokens_among_tiles_are_refused(subject: Subject) -> None:
    with pytest.raises(ConfigError, match="must be default"):
        LlavaNext.from_checkpoint(Given(with_config(subject.config, vision_feature_select_strategy="full")))


def test_an_unknown_tower_is_refused_by_name(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"'resnet'.*clip_vision_model, siglip_vision_model"):
        dummy(raw, vision_config={"model_type": "resnet"})
