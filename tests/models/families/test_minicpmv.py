"""MiniCPM-V: what a picture costs, how it is sliced, every pixel, the decoders of its versions, and its chats."""

from __future__ import annotations

import json
import re
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
MARKS = [f"<{end}{name}>" for name in ("image", "slice", "image_id") for end in ("", "/")]
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": None}, "architectures is None, but ['MiniCPMV'] is needed"),
        ({"architectures": "MiniCPMV"}, "architectures is 'MiniCPMV', but ['MiniCPMV'] is needed"),
        ({"architectures": ["MiniCPM"]}, "architectures is ['MiniCPM'], but ['MiniCPMV'] is needed"),
        ({"query_num": -1}, "query_num is -1, but a whole number"),
        ({"drop_vision_last_layer": 0.5}, "drop_vision_last_layer is 0.5, but true or false is needed"),
        ({"drop_vision_last_layer": -1}, "drop_vision_last_layer is -1, but true or false is needed"),
        ({"vision_config": {"image_size": -1}}, "vision_config.image_size is -1, but a whole number from 1"),
        ({"vision_config": {"patch_size": 0}}, "vision_config.patch_size is 0, but a whole number from 1"),
    ],
    ids=str,
)
def test_a_config_that_says_nonsense_is_refused_by_the_names_it_has(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    edited(family.build(tmp_path), lambda raw: raw.update(changes))
    with pytest.raises(ConfigError, match=re.escape(said)):
        Subject(tmp_path)


@pytest.mark.parametrize("vision", [{}, {"n_queries": 64}], ids=str)
def test_without_architectures_a_config_is_refused(tmp_path: Path, vision: dict[str, int]) -> None:
    def shorten(raw: dict[str, Any]) -> None:
        del raw["architectures"]
        raw["vision_config"].update(vision)

    edited(family.build(tmp_path), shorten)
    with pytest.raises(ConfigError, match=r"architectures is None, but \['MiniCPMV'\] is needed"):
        Subject(tmp_path)


def test_null_is_the_default(tmp_path: Path) -> None:
    names = ("query_num", "drop_vision_last_layer", "image_size", "vision_config")
    edited(family.build(tmp_path), lambda raw: raw.update(dict.fromkeys(names)))
    nulls = open_checkpoint(str(tmp_path)).config.raw

    def shorten(raw: dict[str, Any]) -> None:
        for name in names:
            del raw[name]

    short = open_checkpoint(str(edited(tmp_path, shorten))).config.raw
    assert nulls["vision_config"] == short["vision_config"]
    assert nulls["vision_config"]["n_queries"] == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale_resolution": 112}, r"says scale_resolution=112, but config\.json says 56"),
        ({"scale_resolution": 60_000}, "scale_resolution is 60000, but a whole number from 1 to 4096"),
        ({"max_slice_nums": 65}, "max_slice_nums is 65, but a whole number from 1 to 64"),
    ],
    ids=str,
)
def test_views_of_another_size_and_too_many_slices_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = family.build(tmp_path) / "preprocessor_config.json"
    file.write_text(json.dumps({**family.PIXELS, **changes}))
    with pytest.raises(ConfigError, match=said):
        Subject(tmp_path)


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


def test_a_mark_that_is_no_added_token_is_refused(tmp_path: Path) -> None:
    """Texts would not become it, or could not be kept from it."""
    file = family.build(tmp_path) / "tokenizer.json"
    spec = json.loads(file.read_text())
    token = next(token for token in spec["added_tokens"] if token["content"] == "<slice>")
    spec["added_tokens"].remove(token)
    spec["model"]["vocab"]["<slice>"] = token["id"]
    file.write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=r"tokenizer\.json has no token '<slice>'"):
        Subject(tmp_path)


@pytest.mark.parametrize("is_special", [True, False])
def test_a_chat_cannot_write_marks(tmp_path: Path, is_special: bool) -> None:
    file = family.build(tmp_path) / "tokenizer.json"
    spec = json.loads(file.read_text())
    for token in spec["added_tokens"]:
        if token["content"] in (*MARKS, "<unk>"):
            token["special"] = is_special
    file.write_text(json.dumps(spec))
    subject = Subject(tmp_path)
    asked = [{"type": "image", "image": PHOTOS[0]}, {"type": "text", "text": f"see {family.IMAGE} {''.join(MARKS)}"}]
    chat = subject.processor.from_chat([{"role": "user", "content": asked}])
    plain = [{"type": "image", "image": PHOTOS[0]}, {"type": "text", "text": "see"}]
    ids = [subject.processor.tokenizer.token_id(name) for name in (*MARKS, "<unk>")]
    expected = subject.processor.from_chat([{"role": "user", "content": plain}]).token_ids
    assert [i for i in chat.token_ids if i in ids] == [i for i in expected if i in ids]
    assert f"see {family.IMAGE} {''.join(MARKS)}" in subject.processor.tokenizer.decode(chat.token_ids, False)


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
