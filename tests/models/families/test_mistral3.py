"""Mistral 3 and LLaVA with a Pixtral tower: what a picture costs and what is computed, against Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.processor.families import family_for
from saccade.processor.families.mistral3 import Mistral3
from saccade.types.media import Grid, Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_mistral3
from tests.helpers.families.family_checks import Given, Subject, as_patches, assert_close, dummy, edited
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2), make_photo(31, 33, 3), make_photo(300, 70, 4)]
PUBLISHED = {"pixtral": Mistral3(16, 1, Size(1024, 1024), 10, 12, 13, {})}
PUBLISHED["mistral3"] = Mistral3(14, 2, Size(1540, 1540), 10, 12, 13, {})
sides = st.one_of(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 60_000))


class Case(NamedTuple):
    build: Callable[..., Path]
    folder: Path
    subject: Subject
    reference: Reference
    merge: int


@pytest.fixture(scope="module", params=["pixtral", "mistral3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    is_merged = request.param == "mistral3"
    build = family_mistral3.build if is_merged else family_mistral3.build_pixtral
    read = family_mistral3.reference if is_merged else family_mistral3.pixtral_reference
    folder = build(tmp_path_factory.mktemp(request.param))
    return Case(build, folder, Subject(folder), read(folder), 2 if is_merged else 1)


# --- what a picture costs -----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(width=sides, height=sides, name=st.sampled_from(["pixtral", "mistral3"]))
def test_any_image_is_resized_as_by_transformers(width: int, height: int, name: str) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    family = PUBLISHED[name]
    geometry = family.geometry(Size(width, height), *family.policy(None, None))
    stand_in = np.broadcast_to(np.uint8(0), (3, height, width))  # its shape is all that is looked at
    edges, side = (family.edges.height, family.edges.width), family.token_side
    expected = get_resize_output_image_size(stand_in, edges, side, "channels_first")
    assert (geometry.resized.height, geometry.resized.width) == expected
    rows, columns = expected[0] // side, expected[1] // side
    assert (geometry.tokens, geometry.slots) == (rows * (columns + 1), rows * columns)
    assert geometry.grid == Grid(1, rows * family.merge_size, columns * family.merge_size)


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_the_tokens_are_those_of_the_whole_processor(case: Case, width: int, height: int) -> None:
    assume(max(width, height) / min(width, height) <= 50)  # thinner ones vanish there at this small edge
    photo = make_photo(width, height)
    spelled = case.reference.read([photo])[1][0]
    ids = case.reference.tokenizer(spelled, add_special_tokens=False)["input_ids"]
    expansion = case.subject.family.expand(case.subject.geometry(photo))
    assert expansion.token_ids.tolist() == ids
    image = case.subject.config.image_token_id
    assert expansion.is_embed == tuple(token == image for token in ids)


@settings(max_examples=100, deadline=None)
@given(width=st.integers(64, 4000), height=st.integers(64, 4000), highest=st.integers(50_000, 900_000))
def test_a_lower_limit_is_kept(width: int, height: int, highest: int) -> None:
    family = PUBLISHED["pixtral"]
    resized = family.geometry(Size(width, height), *family.policy(None, highest)).resized
    assert resized.width * resized.height <= highest or min(resized) == family.token_side


def test_a_higher_minimum_enlarges() -> None:
    family = PUBLISHED["pixtral"]
    assert family.geometry(Size(32, 32), *family.policy(None, None)).slots == 4
    assert family.geometry(Size(32, 32), *family.policy(256 * 256, None)).slots == 256


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("pixtral", Size(1024, 1024), 64 * 65),
        ("pixtral", Size(640, 480), 30 * 41),
        ("pixtral", Size(1920, 1080), 36 * 65),
        ("mistral3", Size(1540, 1540), 55 * 56),
        ("mistral3", Size(640, 480), 18 * 24),
    ],
)
def test_worked_examples(name: str, size: Size, tokens: int) -> None:
    assert PUBLISHED[name].geometry(size, *PUBLISHED[name].policy(None, None)).tokens == tokens


def test_every_limit_changes_the_tag() -> None:
    family = PUBLISHED["pixtral"]
    assert len({family.policy_tag(1, 2), family.policy_tag(1, 3), PUBLISHED["mistral3"].policy_tag(1, 2)}) == 3


# --- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: f"{photo.width}x{photo.height}")
def test_prepared_patches_equal_those_of_transformers(case: Case, photo: Any) -> None:
    theirs = as_patches(case.reference.read([photo])[0]["pixel_values"], 14)  # row by row
    grid, merge = case.subject.geometry(photo).grid, case.merge
    places = torch.arange(grid.patches).view(grid.h // merge, merge, grid.w // merge, merge)
    by_token = theirs[places.transpose(1, 2).flatten()]
    torch.testing.assert_close(case.subject.prepare(photo), by_token, rtol=0, atol=2e-6)


def test_a_tower_with_gelu_matches(tmp_path: Path) -> None:
    folder = family_mistral3.build(tmp_path, vision={"hidden_act": "gelu"})
    theirs = family_mistral3.reference(folder)
    with torch.inference_mode():
        features = theirs.model.get_image_features(**theirs.read(PHOTOS[:1])[0]).pooler_output
    assert_close(Subject(folder).embeddings(PHOTOS[:1])[0], features[0])


@pytest.mark.parametrize("layer", [-2, 1])
def test_features_are_taken_where_the_config_says(tmp_path: Path, layer: int) -> None:
    folder = edited(family_mistral3.build_pixtral(tmp_path), lambda raw: raw.update(vision_feature_layer=layer))
    theirs = family_mistral3.pixtral_reference(folder)
    with torch.inference_mode():
        features = theirs.model.get_image_features(**theirs.read(PHOTOS[:1])[0]).pooler_output
    assert_close(Subject(folder).embeddings(PHOTOS[:1])[0], features[0])


# --- what checkpoints say -----------------------------------------------------------------------------------------


def test_a_config_that_leaves_out_the_towers_defaults_is_read() -> None:
    """As Pixtral 12B was published."""
    text = {"hidden_size": 5120, "num_hidden_layers": 40, "model_type": "mistral", "sliding_window": None}
    vision = {"hidden_act": "silu", "image_size": 1024, "model_type": "pixtral", "patch_size": 16}
    config = model_config(
        {"model_type": "llava", "image_token_index": 10, "text_config": text, "vision_config": vision}
    )
    assert family_for(config) is Mistral3
    assert config.vision is not None
    assert (config.vision.hidden_size, config.vision.num_layers, config.vision.num_heads) == (1024, 24, 16)
    assert config.vision.is_gated


@pytest.mark.parametrize(
    ("size", "edges"),
    [(None, (1024, 1024)), (300, (300, 300)), ({"longest_edge": 9}, (9, 9)), ({"height": 5, "width": 7}, (7, 5))],
)
def test_the_longest_edge_is_read_in_every_dialect(case: Case, size: Any, edges: tuple[int, int]) -> None:
    files = Given(case.subject.config, {} if size is None else {"size": size}, path=case.folder)
    assert Mistral3.from_checkpoint(files).edges == edges


@pytest.mark.parametrize(
    ("image_processor", "said"),
    [({"do_resize": False}, "do_resize=false"), ({"size": {"shortest_edge": 5}}, "longest_edge, or height and width")],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(case: Case, image_processor: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Mistral3.from_checkpoint(Given(case.subject.config, image_processor, path=case.folder))


def test_a_tokenizer_without_tokens_for_rows_is_refused(case: Case, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "[IMG_END]", "id": 7}]}))
    with pytest.raises(ConfigError, match=r"no token \[IMG_BREAK\], which"):
        Mistral3.from_checkpoint(Given(case.subject.config, path=tmp_path))


def test_dropping_a_class_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    raw = json.loads((family_mistral3.build_pixtral(tmp_path) / "config.json").read_text())
    with pytest.raises(ConfigError, match="set it to full"):
        dummy(raw, vision_feature_select_strategy="default")


def test_merging_the_patches_of_several_layers_is_refused(tmp_path: Path) -> None:
    raw = json.loads((family_mistral3.build(tmp_path) / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"vision_feature_layer is \[1, -1\]"):
        dummy(raw, vision_feature_layer=[1, -1])
