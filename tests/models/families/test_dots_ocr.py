"""dots.ocr: every pixel, what its configs vary, and its chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from saccade.errors import ConfigError
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import family_for
from saccade.types.media import Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_dots_ocr as family
from tests.helpers.families.family_checks import Subject, assert_close, edited
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2)]
NO_EPS: list[Any] = ["x", {}, [], -1, float("inf")]
TEXT = f"{family.IMAGE}Read it. {family.IMAGE}And this."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.build(tmp_path_factory.mktemp("dots_ocr"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family.reference(folder)


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_every_pixel_is_that_of_the_published_processor(
    subject: Subject, reference: Reference, width: int, height: int
) -> None:
    assume(max(width, height) / min(width, height) <= 100)
    photo = make_photo(width, height)
    made, spelled = reference.read([photo])
    assert len(spelled[0]) == subject.geometry(photo).tokens * len("<|imgpad|>")
    torch.testing.assert_close(subject.prepare(photo), made["pixel_values"], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("size", "tokens"), [(Size(1280, 960), 1564), (Size(1654, 2339), 4956), (Size(5000, 5000), 14400)]
)
def test_worked_examples(folder: Path, size: Size, tokens: int) -> None:
    files = open_checkpoint(str(folder), weights=False)
    rules = family_for(files.config).from_checkpoint(files)
    assert rules.geometry(size, *rules.policy(None, None)).tokens == tokens


@pytest.mark.parametrize(
    "changes",
    [{"vision": {"use_bias": True}}, {"vision": {"post_norm": False}}, {"text": {"rope_theta": 500.0}}],
    ids=str,
)
def test_what_configs_vary_is_followed(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = family.build(tmp_path, **changes)
    assert_close(Subject(made).logits(TEXT, PHOTOS), family.reference(made).logits(TEXT, PHOTOS))


def test_a_config_of_the_other_architecture_without_defaults_is_read_alike(tmp_path: Path) -> None:
    whole = open_checkpoint(str(family.build(tmp_path))).config

    def shorten(raw: dict[str, Any]) -> None:
        raw["architectures"] = ["DotsVLForCausalLM"]
        for name in ("is_causal", "num_channels", "rms_norm_eps", "spatial_merge_size", "temporal_patch_size"):
            del raw["vision_config"][name]

    short = open_checkpoint(str(edited(tmp_path, shorten))).config
    assert (short.text, short.vision, short.image_token_id) == (whole.text, whole.vision, whole.image_token_id)


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        *(("rms_norm_eps", value, "a number of at least 0") for value in NO_EPS),
        ("use_bias", "x", "true or false"),
        ("post_norm", 1, "true or false"),
    ],
)
def test_a_field_of_the_tower_of_another_kind_is_refused(
    folder: Path, tmp_path: Path, name: str, value: Any, needed: str
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    edited(tmp_path, lambda raw: raw["vision_config"].update({name: value}))
    with pytest.raises(ConfigError, match=rf"vision_config\.{name} is .*, but {needed} is needed"):
        open_checkpoint(str(tmp_path), weights=False)


def test_null_is_the_default(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    names = ("is_causal", "rms_norm_eps", "temporal_patch_size", "use_bias", "post_norm", "spatial_merge_size")
    edited(tmp_path, lambda raw: raw["vision_config"].update(dict.fromkeys(names)))
    nulls = open_checkpoint(str(tmp_path), weights=False).config.raw["vision_config"]
    assert (nulls["rms_norm_eps"], nulls["spatial_merge_size"]) == (1e-5, 2)


def test_a_causal_tower_is_refused(tmp_path: Path) -> None:
    edited(family.build(tmp_path), lambda raw: raw["vision_config"].update(is_causal=True))
    with pytest.raises(ConfigError, match="is_causal is True, and only False is supported"):
        open_checkpoint(str(tmp_path))


def test_a_chat_has_pictures_between_the_marks_of_its_user(subject: Subject) -> None:
    """As in training; the published template for parts leaves these marks out."""
    question = [{"type": "image", "image": PHOTOS[0]}, {"type": "text", "text": "Read."}]
    chat = subject.processor.from_chat([{"role": "user", "content": question}])
    written = "<|user|><|img|><|imgpad|><|endofimg|>Read.<|endofuser|><|assistant|>"
    asked = {"prompt": written, "multi_modal_data": {"image": PHOTOS[0]}}
    assert list(chat.token_ids) == list(subject.processor.from_prompt(asked).token_ids)
