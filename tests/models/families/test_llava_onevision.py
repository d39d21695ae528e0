"""LLaVA-OneVision: what a picture costs, the limit on its embeddings and what is computed, against Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.processor.families.llava import Llava
from saccade.processor.families.llava_onevision import LlavaOnevision
from saccade.types.media import Size
from tests.helpers.families import family_llava_onevision
from tests.helpers.families.conformance import ROWS
from tests.helpers.families.family_checks import (
    CPU,
    Given,
    Subject,
    as_patches,
    assert_close,
    dummy,
    edited,
    finish,
    with_config,
)
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

RULES = ROWS["llava_onevision"].rules  # of the checkpoints on the hub

PINPOINTS = LlavaOnevisionImageProcessorPil.image_grid_pinpoints  # the published ones: up to 6 x 6 tiles of 384
# The last two have more patches than may be kept: one is reduced, the other within the slack.
PHOTOS = [make_photo(112, 84, 1), make_photo(31, 33, 2), make_photo(300, 70, 3), make_photo(200, 190, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_llava_onevision.build(tmp_path_factory.mktemp("llava_onevision"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder)


# --- what a picture costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tokens", "tiles"),
    [
        (Size(384, 384), 729 + 27 * 28, 2),
        (Size(640, 480), 729 + 40 * 55, 5),
        (Size(1152, 1152), 729 + 81 * 82, 10),
        (Size(2304, 2304), 729 + 81 * 82, 37),
    ],
)
def test_worked_examples(size: Size, tokens: int, tiles: int) -> None:
    geometry = RULES.geometry(size, *RULES.policy(None, None))
    assert (geometry.tokens, geometry.grid.t) == (tokens, tiles)


# --- what is computed ---------------------------------------------------------------------------------------------


def test_one_photo_is_reduced_and_another_is_not(subject: Subject) -> None:
    tilings = [subject.geometry(photo).tiling for photo in PHOTOS]
    assert [tiling is not None and tiling.kept != tiling.joined for tiling in tilings] == [False, False, False, True]


def test_a_pooling_head_that_is_not_used_is_left_out(tmp_path: Path, subject: Subject) -> None:
    folder = family_llava_onevision.build(tmp_path, vision={"vision_use_head": True})
    assert len(Subject(folder).embeddings(PHOTOS[:1])[0]) == subject.geometry(PHOTOS[0]).slots


def test_plain_llava_with_a_siglip_tower_matches(tmp_path: Path) -> None:
    """As LLaVA-Interleave has it."""
    text = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
    config = LlavaConfig(
        text_config=text,
        vision_config=SiglipVisionConfig(**family_llava_onevision.VISION),
        image_token_index=98,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    theirs = LlavaForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    ours = load_model(tmp_path, model_config(raw), dtype=torch.float32, device=CPU, progress=False)
    family = Llava.from_checkpoint(Given(model_config(raw), {"size": {"height": 60, "width": 60}, "do_center_crop": 0}))
    geometry = family.geometry(Size(90, 60), 1, 1)
    assert geometry.tokens == 16
    pixels = torch.randn(1, 3, 60, 60)
    with torch.inference_mode():
        features = finish(ours.encode(as_patches(pixels, 14), [geometry.grid]))
        assert_close(features[0], theirs.get_image_features(pixels).pooler_output[0])


# --- what checkpoints say -----------------------------------------------------------------------------------------


def test_a_head_that_only_the_text_config_calls_tied_is_the_embedding_table(tmp_path: Path) -> None:
    """As the 0.5B model was published: `tie_word_embeddings` is false at the top, and no head is stored."""
    folder = family_llava_onevision.build(tmp_path, layout="published")
    edited(folder, lambda raw: raw["text_config"].update(tie_word_embeddings=True))
    weights = load_file(folder / "model.safetensors")
    del weights["language_model.lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = family_llava_onevision.reference(folder)
    assert_close(Subject(folder).logits("what is it?", []), theirs.logits("what is it?", []))


def test_a_silent_checkpoint_has_the_published_pinpoints_and_nine_tiles(subject: Subject) -> None:
    silent = with_config(subject.config, image_grid_pinpoints=None, vision_aspect_ratio=None)
    family = LlavaOnevision.from_checkpoint(Given(silent))
    scaled = [[height * 60 // 384, width * 60 // 384] for height, width in PINPOINTS]
    assert [[size.height, size.width] for size in family.pinpoints] == scaled
    assert family.max_tiles == 9


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"vision_aspect_ratio": "pad"}, "anyres_max_ and a number, not 'pad'"),
        ({"vision_feature_select_strategy": "default"}, "must be full"),
    ],
    ids=str,
)
def test_configs_that_cannot_work_are_refused(subject: Subject, raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LlavaOnevision.from_checkpoint(Given(with_config(subject.config, **raw)))


def test_a_siglip_tower_without_a_class_token_cannot_drop_one(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="set it to full"):
        dummy(raw, vision_feature_select_strategy="default")
