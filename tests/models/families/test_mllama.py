"""Llama 3.2 Vision: what a picture costs, how it is tiled and what the model makes of it, against Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_all_supported_aspect_ratios,
    get_image_size_fit_to_canvas,
    get_optimal_tiled_canvas,
)
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from saccade import costs
from saccade.checkpoint.config import model_config
from saccade.cli.count import count_files
from saccade.errors import ConfigError, RequestError
from saccade.models.layers.cross_attention import pack, unpack
from saccade.models.layers.torch_attention import PagedKV
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families.base import cross_attended
from saccade.processor.families.mllama import Mllama, arrangements
from saccade.runner.cross_attention_metadata import rows_by_image, stretches
from saccade.types.media import Grid, Size
from saccade.types.prompt import Span
from saccade.types.step import ScheduledWindow
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_mllama
from tests.helpers.families.family_checks import (
    CPU,
    CrossAttentionSubject,
    Given,
    as_patches,
    assert_close,
    dummy,
    edited,
)
from tests.helpers.families.family_mllama import HUB, IMAGE, TILE
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

# One, two, three and four tiles: wide, tall, square.
UNSPLICED = (False,)  # the one token of a picture takes no embedding
PHOTOS = [make_photo(50, 40, 1), make_photo(110, 50, 2), make_photo(40, 160, 3), make_photo(112, 84, 4)]
SIDES = st.one_of(st.integers(1, 64), st.integers(1, 2500), st.integers(1, 20_000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_mllama.build(tmp_path_factory.mktemp("mllama"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> CrossAttentionSubject:
    return CrossAttentionSubject(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family_mllama.reference(folder)


@pytest.fixture(scope="module")
def as_it_is(folder: Path) -> Reference:
    return family_mllama.reference(folder, sees_ahead=True)


@pytest.fixture(scope="module")
def published() -> Mllama:
    """The rules of the 11B checkpoint on the hub."""
    return Mllama.from_checkpoint(Given(model_config(HUB), HUB_PIXELS))


HUB_PIXELS = {**family_mllama.IMAGE_PROCESSOR, "size": {"height": 560, "width": 560}}


# --- what a picture costs -----------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(SIDES, SIDES)
def test_canvas_and_size_equal_the_hugging_face_processor(published: Mllama, width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    canvas = get_optimal_tiled_canvas(height, width, max_image_tiles=4, tile_size=560)
    resized = get_image_size_fit_to_canvas(height, width, *canvas, tile_size=560)
    ours = published.geometry(Size(width, height), *published.policy(None, None))
    assert (ours.grid.h * 14, ours.grid.w * 14) == canvas
    assert ours.resized == Size(resized[1], resized[0])
    assert ours.tokens == 1 and ours.slots == ours.grid.patches // 1600 * 6404


def test_tiles_are_numbered_as_the_hugging_face_processor_numbers_them() -> None:
    for tiles in (1, 2, 4, 6):
        assert arrangements(tiles) == get_all_supported_aspect_ratios(tiles)


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 300), st.integers(8, 300))
def test_patches_equal_the_hugging_face_pixels_with_black_beside_the_image(
    subject: CrossAttentionSubject, width: int, height: int
) -> None:
    photo = make_photo(width, height, seed=width)
    made = MllamaImageProcessorPil(**family_mllama.IMAGE_PROCESSOR)([[photo]], return_tensors="pt")
    tiles = int(made["num_tiles"][0][0])
    theirs = as_patches(made["pixel_values"][0, 0, :tiles], 14)  # tile after tile
    grid = subject.geometry(photo).grid
    rows, columns, side = grid.h // 4, grid.w // 4, 4
    ours = subject.prepare(photo).view(rows, side, columns, side, -1).transpose(1, 2).reshape(theirs.shape)
    assert rows * columns == tiles
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_the_published_model_keeps_a_image_of_four_tiles_in_210_megabytes(published: Mllama) -> None:
    text = model_config(HUB).text
    geometry = published.geometry(Size(1120, 1120), *published.policy(None, None))
    assert (geometry.tokens, geometry.slots) == (1, 25_616)
    assert geometry.slots * costs.embedding_bytes_per_slot(text, "bfloat16") == 6404 * 8 * 4096 == 209_846_272
    assert costs.kv_bytes_per_token(text, "bfloat16") == 32 * 4096, "8 of 40 layers keep nothing of the text"
    assert published.geometry(Size(300, 200), *published.policy(None, None)).slots == 6404
    assert published.largest(*published.policy(None, None)).slots == 25_616


def test_fewer_pixels_mean_fewer_tiles_but_at_least_one(published: Mllama) -> None:
    size = Size(3000, 1000)
    tiles = [published.geometry(size, *published.policy(None, limit)).slots / 6404 for limit in (10**6, 700_000, 1000)]
    assert tiles == [3, 2, 1]
    assert published.largest(*published.policy(None, 700_000)).slots == 2 * 6404
    tags = {published.policy_tag(*published.policy(None, limit)) for limit in (None, 700_000, 650_000)}
    assert len(tags) == 2, "limits that allow the same tiles make the same picture"


def test_a_image_is_one_token_that_keeps_its_own_embedding(subject: CrossAttentionSubject) -> None:
    token_ids, is_embed, is_cross_attended = subject.family.expand(subject.geometry(PHOTOS[0]))
    assert token_ids.tolist() == [subject.config.image_token_id] and is_embed == (False,) and is_cross_attended
    positions, following = subject.family.positions([0] * 5, [Span(1, 1, bytes(32), 8)], [Grid(1, 4, 4)])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] and following == 5


def test_count_needs_the_small_files_only(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "processor_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    PHOTOS[1].save(tmp_path / "wide.png")
    counts, errors = count_files([str(tmp_path / "wide.png")], Options(model=str(tmp_path)))
    assert not errors and (counts[0].tokens, counts[0].kv_blocks) == (1, 1)
    assert (counts[0].resized_width, counts[0].resized_height) == (110, 50)


def test_the_placeholder_behind_the_vocabulary_may_come_as_an_id(subject: CrossAttentionSubject) -> None:
    token = subject.config.image_token_id
    assert token == subject.config.text.vocab_size
    prompt = subject.processor.from_prompt(
        {"prompt_token_ids": [token, 5, 6], "multi_modal_data": {"image": PHOTOS[0]}}
    )
    assert prompt.token_ids == [token, 5, 6] and prompt.spans[0].is_cross_attended
    with pytest.raises(RequestError, match=rf"holds {token + 1}, but this model's ids go from 0 to {token - 1}"):
        subject.processor.from_prompt({"prompt_token_ids": [5, token + 1]})


# --- who sees what ------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=14), st.data())
def test_each_row_sees_the_images_that_the_models_own_mask_allows(is_image: list[bool], data: Any) -> None:
    places = [at for at, is_one in enumerate(is_image) if is_one]
    spans = cross_attended([Span(at, 1, bytes([at]) * 32, 8, UNSPLICED) for at in places])
    length = len(is_image)
    ranges = get_cross_attention_token_mask([9 if is_one else 1 for is_one in is_image], 9)
    allowed = [
        [at for at, (low, high) in zip(places, ranges, strict=True) if low <= row < (length if high < 0 else high)]
        for row in range(length)
    ]
    start = data.draw(st.integers(0, length - 1))
    found: list[list[int]] = [[] for _ in range(length)]
    for low, high, keys in stretches(spans, start, length):
        for row in range(low, high):
            found[row] = [key[0] for key in keys]
    assert found[start:] == allowed[start:]


def test_rows_of_several_requests_that_see_the_same_images_go_together() -> None:
    a, b = bytes([1]) * 32, bytes([2]) * 32
    first, second = (
        cross_attended([Span(2, 1, a, 8, UNSPLICED)]),
        cross_attended([Span(0, 1, a, 8, UNSPLICED), Span(3, 1, b, 8, UNSPLICED)]),
    )
    windows = [
        (ScheduledWindow("x", 0, 4, (), True), first),
        (ScheduledWindow("y", 7, 8, (), True), second),
        (ScheduledWindow("z", 1, 2, (), True), first),
    ]
    windows.append((ScheduledWindow("w", 1, 2, (), True), second))
    seen = rows_by_image(windows, {a: torch.ones(1), b: torch.zeros(1)}, CPU)
    assert [(group.rows.tolist(), [int(e) for e in group.embeddings]) for group in seen] == [
        ([2, 3, 6], [1]),
        ([4], [0]),
    ]


# --- what the model computes --------------------------------------------------------------------------------------


@torch.inference_mode()
def test_keys_and_values_of_each_image_equal_transformers(subject: CrossAttentionSubject, reference: Reference) -> None:
    ours = subject.embeddings(PHOTOS)
    model = reference.model.model
    for photo, kept in zip(PHOTOS, ours, strict=True):
        made, _ = reference.read([photo])
        tiles = int(made["aspect_ratio_mask"].sum())
        features = model.vision_model(**made).last_hidden_state[0, 0, :tiles].flatten(0, 1)
        states = model.multi_modal_projector(features)
        found = unpack(subject.model.decoder.cross_layers, kept)
        assert len(kept) == subject.geometry(photo).slots and found.shape[2] == len(states) == tiles * 17
        for number, index in enumerate(model.language_model.cross_attention_layers):
            layer = model.language_model.layers[index].cross_attn
            assert_close(found[number, 0], layer.k_norm(layer.k_proj(states).unflatten(1, (2, 16))))
            assert_close(found[number, 1], layer.v_proj(states).unflatten(1, (2, 16)))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The quick brown fox jumps over the lazy dog", 0),
        (f"{IMAGE}What is in the picture?", 1),
        (f"{IMAGE}{IMAGE}Compare these two pictures.", 2),
        (f"{IMAGE}First, then {IMAGE} and describe", 2),
        (f"{IMAGE}", 1),
    ],
)
def test_logits_of_prompts_that_begin_with_the_image_equal_transformers(
    subject: CrossAttentionSubject, as_it_is: Reference, text: str, count: int
) -> None:
    photos = PHOTOS[1 : 1 + count]
    assert_close(subject.logits(text, photos), as_it_is.logits(text, photos))


@pytest.mark.parametrize(("text", "count"), [(f"Look: {IMAGE} here", 1), (f"a {IMAGE} b {IMAGE}{IMAGE} c", 3)])
def test_logits_elsewhere_equal_transformers_with_the_text_before_passed_by(
    subject: CrossAttentionSubject, reference: Reference, text: str, count: int
) -> None:
    assert_close(subject.logits(text, PHOTOS[:count]), reference.logits(text, PHOTOS[:count]))


def test_text_before_a_image_does_not_depend_on_it(subject: CrossAttentionSubject) -> None:
    text = "The quick brown fox jumps over"
    one, other = (subject.logits(f"{text}{IMAGE} and", [photo]) for photo in PHOTOS[:2])
    alone = subject.logits(text, [])
    before = len(alone)
    assert torch.equal(one[:before], other[:before])
    torch.testing.assert_close(one[:before], alone)
    assert not torch.allclose(one[before:], other[before:], rtol=1e-2)


def test_a_image_out_of_sight_changes_later_text_only_through_the_text_between(subject: CrossAttentionSubject) -> None:
    keys = [bytes([n]) * 32 for n in range(2)]
    spans = cross_attended([Span(0, 1, keys[0], 8, UNSPLICED), Span(4, 1, keys[1], 8, UNSPLICED)])
    assert [found for _, _, found in stretches(spans, 0, 9)] == [(keys[0],), (keys[1],)]


def test_what_is_kept_fills_whole_rows_whatever_the_widths(subject: CrossAttentionSubject) -> None:
    states = torch.randn(5, 64)
    every = subject.model.decoder.cross_layers
    one = every[:1]  # 64 values of a state: as wide as a row; two layers take two rows
    for layers, rows in ((one, 5), (every, 10)):
        kept = pack(layers, states)
        assert kept.shape == (rows, 64)
        torch.testing.assert_close(unpack(layers, kept)[0], layers[0].attention.project(states))


def test_only_layers_that_read_the_text_have_kv_memory(subject: CrossAttentionSubject) -> None:
    kv = PagedKV.allocate(subject.config.text, 2, 4, torch.float32, CPU)
    assert len(kv.k) == 3 and subject.config.text.num_layers == 5
    assert costs.kv_bytes_per_block(subject.config.text, "float32", 4) * 2 == kv.k.nbytes + kv.v.nbytes


# --- configs ------------------------------------------------------------------------------------------------------


def small_raw(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


@pytest.mark.parametrize("given", [{"hidden_act": "quick_gelu"}, {"image_size": 28}, {"image_size": 42}])
def test_towers_of_other_shapes_equal_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    """Tiles of 2x2, 3x3 and 4x4 patches are padded by 3, 6 and 7 rows."""
    folder = family_mllama.build(tmp_path, vision=given)
    side = given.get("image_size", TILE)
    size = {"size": {"height": side, "width": side}}
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "image_processor": {**settings["image_processor"], **size}}))
    text = f"{IMAGE}What is it?"
    assert_close(
        CrossAttentionSubject(folder).logits(text, PHOTOS[1:2]),
        family_mllama.reference(folder).logits(text, PHOTOS[1:2]),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"cross_attention_layers": []}}, "must name some of the decoder's 5 layers"),
        ({"text_config": {"cross_attention_layers": [3, 1]}}, "rising"),
        ({"text_config": {"cross_attention_layers": [1, 7]}}, r"cross_attention_layers \[1, 7\]"),
        ({"vision_config": {"intermediate_layers_indices": [0, 5]}}, "lie within 3 layers"),
        ({"vision_config": {"image_size": 50}}, "image_size 50 must be the side of a tile"),
        ({"tie_word_embeddings": True}, "ties the head"),
    ],
)
def test_a_decoder_or_tower_that_cannot_be_built_is_a_config_error(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dummy(small_raw(folder), **changes)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        ({"do_pad": False}, "do_pad=false"),
        ({"do_resize": False}, "do_resize=false"),
        ({"size": {"height": 56, "width": 28}}, "one height and width"),
        ({"max_image_tiles": 2}, "cuts 2 tiles of 56 pixels, but the vision tower takes 4 of 56"),
        ({"size": {"height": 28, "width": 28}}, "tiles of 28 pixels"),
    ],
)
def test_an_image_processor_that_does_not_fit_the_tower_is_a_config_error(
    folder: Path, pixels: dict[str, Any], message: str
) -> None:
    config = open_checkpoint(str(folder), weights=False).config
    with pytest.raises(ConfigError, match=message):
        Mllama.from_checkpoint(Given(config, {**family_mllama.IMAGE_PROCESSOR, **pixels}))


def test_arrangements_in_another_order_are_a_config_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    edited(tmp_path, lambda raw: raw["vision_config"].update(supported_aspect_ratios=[[1, 2], [1, 1]]))
    config = open_checkpoint(str(tmp_path), weights=False).config
    with pytest.raises(ConfigError, match="not all arrangements of 4 tiles"):
        Mllama.from_checkpoint(Given(config, family_mllama.IMAGE_PROCESSOR))


def test_a_silent_image_processor_means_what_transformers_assumes(folder: Path) -> None:
    model = dummy(small_raw(folder))
    theirs = MllamaImageProcessorPil()
    assert model.pixels.mean == tuple(theirs.image_mean) and model.pixels.std == tuple(theirs.image_std)
    assert model.pixels.resample == theirs.resample and np.isclose(model.pixels.scale, 1 / 255)
