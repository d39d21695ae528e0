"""MiniCPM-V: what a picture costs, how it is sliced, every pixel, the decoders of its versions, and its chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from saccade.errors import ConfigError
from saccade.models.families.minicpmv import views_of
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.types.media import Grid, Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_minicpmv as family
from tests.helpers.families import reference_minicpmv as slow
from tests.helpers.families.conformance import ROWS
from tests.helpers.families.family_checks import Subject, assert_close, edited
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2)]
TEXT = f"{family.IMAGE}\nRead it. {family.IMAGE}And this."
PUBLISHED = ROWS["minicpmv"].rules
sides = st.one_of(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 60_000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.build(tmp_path_factory.mktemp("minicpmv"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family.reference(folder)


# --- what a picture costs -----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(width=sides, height=sides)
@example(width=448, height=448)
@example(width=449, height=448)
@example(width=60_000, height=300)
def test_any_image_has_the_views_of_the_published_rule(width: int, height: int) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    size = (width, height)
    geometry = PUBLISHED.geometry(Size(*size), *PUBLISHED.policy(None, None))
    grid = slow.grid_of(size, 9, 448)
    columns, rows = grid or (0, 0)
    views = [slow.view_size(size, 448, 14, enlarge=grid is None)]
    views += [slow.slice_size(size, grid, 448, 14)] * (columns * rows) if grid else []
    assert geometry.slots == 64 * len(views)
    assert geometry.tokens == 66 * len(views) + max(0, rows - 1)
    assert geometry.grid.patches == sum(w * h for w, h in views) // 14**2
    expected = [Grid(1, h // 14, w // 14) for w, h in views]
    assert [grid._replace(t=1) for grid in views_of(geometry, 14) for _ in range(grid.t)] == expected


@pytest.mark.parametrize(
    ("size", "grid", "tokens"),
    [
        (Size(448, 448), None, 66),
        (Size(1280, 960), (3, 2), 463),
        (Size(1920, 1080), (4, 2), 595),
        (Size(1654, 2339), (3, 3), 662),
        (Size(300, 4000), (1, 7), 534),
    ],
)
def test_worked_examples(size: Size, grid: tuple[int, int] | None, tokens: int) -> None:
    geometry = PUBLISHED.geometry(size, *PUBLISHED.policy(None, None))
    assert (geometry.tiling[:2] if geometry.tiling else None) == grid
    assert geometry.tokens == len(PUBLISHED.expand(geometry).token_ids) == tokens


def test_a_lower_limit_allows_fewer_slices() -> None:
    limits = PUBLISHED.policy(None, 2 * 448**2)
    assert PUBLISHED.geometry(Size(1500, 3000), *limits).slots == 3 * 64
    assert PUBLISHED.geometry(Size(1500, 3000), *PUBLISHED.policy(None, 1)).slots == 64
    assert PUBLISHED.policy_tag(*limits) != PUBLISHED.policy_tag(*PUBLISHED.policy(None, None))


# --- what is computed ---------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_every_pixel_is_that_of_the_published_slices(
    subject: Subject, reference: Reference, width: int, height: int
) -> None:
    assume(max(width, height) / min(width, height) <= 100)
    photo = make_photo(width, height)
    made = reference.read([photo])[0]["views"][0]
    patches = [torch.nn.functional.unfold(view[None], 14, stride=14)[0].T for view in made]
    torch.testing.assert_close(subject.prepare(photo), torch.cat(patches), rtol=0, atol=2e-6)


@pytest.mark.parametrize("version", [2.6, 4.0])
def test_logits_of_the_other_versions_equal_those_of_the_reference(version: float, tmp_path: Path) -> None:
    made = family.build(tmp_path, version=version)
    assert_close(Subject(made).logits(TEXT, PHOTOS), family.reference(made).logits(TEXT, PHOTOS))


def test_a_tower_without_its_last_layer_is_followed(tmp_path: Path) -> None:
    made = family.build(tmp_path, drop_vision_last_layer=True)
    assert_close(Subject(made).logits(TEXT, PHOTOS), family.reference(made).logits(TEXT, PHOTOS))


# --- what is refused, and chats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, 2.5, "x"])
def test_other_versions_are_refused_with_the_value(folder: Path, tmp_path: Path, version: Any) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    edited(tmp_path, lambda raw: raw.update(version=version))
    with pytest.raises(ConfigError, match=rf"version is {version!r}, and only 2\.6, 4\.0, 4\.5 are supported"):
        open_checkpoint(str(tmp_path), weights=False)


def test_images_that_are_not_sliced_are_refused(tmp_path: Path) -> None:
    file = family.build(tmp_path) / "preprocessor_config.json"
    file.write_text(json.dumps({**family.PIXELS, "slice_mode": False}))
    with pytest.raises(ConfigError, match="slice_mode=false"):
        Subject(tmp_path)


def test_a_vocabulary_without_a_mark_is_refused(tmp_path: Path) -> None:
    file = family.build(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace("<slice>", "<other>"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json has no token '<slice>'"):
        Subject(tmp_path)


def test_parts_of_a_message_are_lines_and_images_are_numbered_through_a_chat(subject: Subject) -> None:
    first = [{"type": "image", "image": PHOTOS[0]}, {"type": "text", "text": "Read."}]
    second = [{"type": "text", "text": "And (<image>./</image>)?"}, {"type": "image", "image": PHOTOS[1]}]
    said = {"role": "assistant", "content": "Two."}
    chat = subject.processor.from_chat([{"role": "user", "content": first}, said, {"role": "user", "content": second}])
    assert [span.length for span in chat.spans] == [subject.geometry(photo).tokens for photo in PHOTOS]
    ids = list(chat.token_ids)
    for span in reversed(chat.spans):
        del ids[span.start : span.end]
    assert subject.processor.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\n<image_id>0</image_id>\nRead.<|im_end|>\n"
        "<|im_start|>assistant\nTwo.<|im_end|>\n"
        "<|im_start|>user\nAnd (<image>./</image>)?\n<image_id>1</image_id><|im_end|>\n<|im_start|>assistant\n"
    )
