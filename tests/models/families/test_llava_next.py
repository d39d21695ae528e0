"""LLaVA-NeXT: what a picture costs, how it is cut and what the tower makes of it, against Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlavaNextProcessor, PreTrainedTokenizerFast
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from saccade.engine.ipc.messages import HEADER, Start, command_in, frame, start_message
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.processor.families.llava_next import LlavaNext
from saccade.types.media import Grid, Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_llava_next
from tests.helpers.families.family_checks import Given, Subject, as_patches, assert_close, dummy, edited, with_config
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

PUBLISHED = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2), make_photo(31, 33, 3), make_photo(300, 70, 4)]
sides = st.one_of(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 60_000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_llava_next.build(tmp_path_factory.mktemp("llava_next"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family_llava_next.reference(folder)


@pytest.fixture(scope="module")
def published(subject: Subject) -> LlavaNext:
    """The rules of the checkpoints on the hub: tiles of 336, patches of 14."""
    assert subject.config.vision is not None
    family = subject.family
    assert isinstance(family, LlavaNext)
    sizes = tuple(Size(width, height) for height, width in PUBLISHED)
    return LlavaNext(336, 14, sizes, family.image_token_id, family.placeholder_ids, {})


@pytest.fixture(scope="module")
def their_rules(folder: Path) -> LlavaNextProcessor:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    images = LlavaNextImageProcessorPil(image_grid_pinpoints=PUBLISHED)
    return LlavaNextProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


# --- what a picture costs -----------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(width=sides, height=sides)
def test_any_image_has_the_tokens_and_the_size_of_transformers(
    published: LlavaNext, their_rules: LlavaNextProcessor, width: int, height: int
) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    geometry = published.geometry(Size(width, height), *published.policy(None, None))
    expected = their_rules._get_number_of_features(height, width, 336, 336) - 1
    assert geometry.tokens == geometry.slots == expected
    target = select_best_resolution((height, width), PUBLISHED)
    stand_in = np.broadcast_to(np.uint8(0), (3, height, width))  # its shape is all that is looked at
    fitted = get_patch_output_size(stand_in, target, "channels_first")
    assert (geometry.resized.height, geometry.resized.width) == fitted
    assert geometry.grid == Grid(1 + target[0] * target[1] // 336**2, 24, 24)


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_the_tiles_are_those_of_the_whole_processor(subject: Subject, reference: Reference, width: int, height: int):
    assume(max(width, height) / min(width, height) <= 200)
    photo = make_photo(width, height)
    made, spelled = reference.read([photo])
    geometry = subject.geometry(photo)
    assert made["pixel_values"].shape[1] == geometry.grid.t
    assert len(spelled[0]) == geometry.tokens * len("<image>")


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(Size(672, 672), 576 + 48 * 49), (Size(1000, 1000), 2928), (Size(336, 672), 1776), (Size(640, 480), 2340)],
)
def test_worked_examples(published: LlavaNext, size: Size, tokens: int) -> None:
    assert published.geometry(size, *published.policy(None, None)).tokens == tokens


def test_a_lower_limit_leaves_out_the_larger_pinpoints(published: LlavaNext) -> None:
    limits = published.policy(None, 300_000)
    assert published.geometry(Size(672, 672), *limits).grid == Grid(3, 24, 24)
    assert published.geometry(Size(672, 672), *published.policy(None, 1)).grid == Grid(3, 24, 24)
    assert published.policy_tag(*limits) != published.policy_tag(*published.policy(None, None))


def test_a_tiling_travels_to_the_engines_process(subject: Subject) -> None:
    geometry = subject.geometry(PHOTOS[0])
    start = start_message(Path("."), subject.config, {}, Options(), geometry, [], progress=False)
    received = command_in(bytes(frame(start)[HEADER.size :]))
    assert isinstance(received, Start) and received.largest == geometry and geometry.tiling is not None


# --- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: f"{photo.width}x{photo.height}")
def test_prepared_tiles_equal_those_of_transformers(subject: Subject, reference: Reference, photo: Any) -> None:
    pixels = reference.read([photo])[0]["pixel_values"][0]  # [tiles, 3, 56, 56]
    torch.testing.assert_close(subject.prepare(photo), as_patches(pixels, 14), rtol=0, atol=2e-6)


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
