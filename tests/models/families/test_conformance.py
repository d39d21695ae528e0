"""What holds for every family: costs, positions, features, logits, layouts; kernels and graphs of its tower.

A family is a row of `ROWS`. That whole engines give the reference's tokens is in tests/engine/test_parity.py, that
they do so however the work is cut in tests/engine/test_invariance.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from saccade import costs
from saccade.cli.count import count_files
from saccade.errors import ConfigError, RequestError
from saccade.models.cuda.vision import FusedVision
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import family_for
from saccade.types.media import Grid, Size
from saccade.types.prompt import Span
from tests.helpers.families.conformance import LAYOUTS, ROWS, Case, row_of
from tests.helpers.families.families import FAMILIES
from tests.helpers.families.family_checks import assert_close
from tests.helpers.families.qwen_checks import (
    assert_encoding_memory,
    assert_fused_tower_equal,
    assert_positions_equal,
    assert_recorded_passes_equal,
    assert_sizes_equal,
)
from tests.helpers.media.images import make_photo, png

pytestmark = pytest.mark.transformers
WITH_RULES = [name for name, row in ROWS.items() if row.rules is not None]
QWEN = [name for name in LAYOUTS if row_of(name).qwen_patch]
FIRST = [f"{name}-{FAMILIES[name].layouts[0]}" for name in ROWS]  # layouts differ in names of tensors alone
SMALL = [name for name, row in ROWS.items() if row.small]
sides = st.one_of(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 60_000))


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, layout = request.param.split("-")
    return Case(name, FAMILIES[name].build(tmp_path_factory.mktemp(request.param), layout=layout))


# --- geometry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_RULES)
@settings(max_examples=150, deadline=None)
@example(width=32, height=560, highest=70 * 256)  # for Pixtral, a strip of 64 has more tokens, yet fewer embeddings
@given(width=sides, height=sides, highest=st.integers(1, 3_000_000) | st.sampled_from([1, 300_000, 5_308_416]))
def test_no_image_costs_more_than_the_largest(name: str, width: int, height: int, highest: int) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    rules = ROWS[name].rules
    limits = rules.policy(None, highest)
    found, largest = rules.geometry(Size(width, height), *limits), rules.largest(*limits)
    assert found.tokens <= largest.tokens
    assert found.slots <= largest.slots
    assert found.grid.patches <= largest.grid.patches


@pytest.mark.parametrize("name", WITH_RULES)
def test_extreme_aspect_ratios_are_refused(name: str) -> None:
    rules = ROWS[name].rules
    for size in (Size(1, 201), Size(201, 1)):
        with pytest.raises(RequestError, match=f"{size.width}x{size.height}"):
            rules.geometry(size, *rules.policy(None, None))


@pytest.mark.parametrize("name", WITH_RULES)
def test_a_minimum_above_the_maximum_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="min_pixels=9 is above max_pixels=8"):
        ROWS[name].rules.policy(9, 8)


def test_images_are_counted_from_the_config_files_alone(case: Case, tmp_path: Path) -> None:
    for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
        if (case.folder / name).exists():
            (tmp_path / name).write_bytes((case.folder / name).read_bytes())
    (tmp_path / "a.png").write_bytes(png(make_photo(*case.row.counted)))
    counts, errors = count_files([str(tmp_path / "a.png")], Options(model=str(tmp_path)))
    assert not errors and counts[0].tokens == case.row.tokens


@pytest.mark.parametrize("name", [name for name in ROWS if len(FAMILIES[name].layouts) > 1])
def test_both_layouts_give_the_same_rules(name: str, tmp_path: Path) -> None:
    found = []
    for layout in FAMILIES[name].layouts:
        files = open_checkpoint(str(FAMILIES[name].build(tmp_path / layout, layout=layout)))
        found.append(family_for(files.config).from_checkpoint(files))
    assert found[0] == found[1]


@pytest.fixture(scope="module", params=QWEN)
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    name, layout = request.param.split("-")
    patch = ROWS[name].qwen_patch
    assert patch is not None
    return FAMILIES[name].build(tmp_path_factory.mktemp(request.param), layout=layout), patch


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), largest=st.sampled_from([64, 10]))
def test_sizes_and_grids_of_qwen_equal_those_of_the_image_processor(
    qwen: tuple[Path, int], width: int, height: int, largest: int
) -> None:
    folder, patch = qwen
    area = (2 * patch) ** 2  # of a token
    assert_sizes_equal(folder, Size(width, height), (4 * area if largest == 64 else area, largest * area), patch)


# --- positions ----------------------------------------------------------------------------------------------------


def test_positions_equal_those_of_the_model(case: Case) -> None:
    if case.subject.config.text.mrope_section:
        assert_positions_equal(case.reference.model, case.folder)
    else:
        spans, grids = [Span(1, 3, bytes(32), 3)], [Grid(1, 2, 2)]
        positions, following = case.subject.family.positions([0] * 5, spans, grids)
        assert positions.tolist() == [[0, 1, 2, 3, 4]] and following == 5


# --- features -----------------------------------------------------------------------------------------------------


def test_an_image_on_the_device_gives_the_same_patches(case: Case) -> None:
    for photo in case.row.photos[:2]:
        there = torch.from_numpy(np.array(photo))
        found = case.subject.model.prepare(there, case.subject.geometry(photo))
        assert torch.equal(found, case.subject.prepare(photo))


@pytest.mark.parametrize("case", [name for name in LAYOUTS if row_of(name).features], indirect=True)
@torch.inference_mode()
def test_embeddings_equal_the_image_features_of_the_reference(case: Case) -> None:
    photos = list(case.row.photos)
    assert case.row.features is not None
    for ours, photo in zip(case.subject.embeddings(photos), photos, strict=True):
        assert_close(ours, case.row.features(case.reference, photo))


def test_an_image_encodes_the_same_alone_and_packed(case: Case) -> None:
    photos = list(case.row.photos[:2])
    for packed, photo in zip(case.subject.embeddings(photos), photos, strict=True):
        assert_close(packed, case.subject.embeddings([photo])[0], 1e-5)


# --- logits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2])
def test_logits_equal_those_of_the_reference(case: Case, count: int) -> None:
    photos = list(case.row.photos[:count])
    assert_close(case.subject.logits(case.text(count), photos), case.reference.logits(case.text(count), photos))


@pytest.mark.parametrize("case", FIRST, indirect=True)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_do_not_change_the_logits(case: Case, chunk: int) -> None:
    photos = list(case.row.photos[:1])
    whole = case.subject.logits(case.text(1), photos)
    assert_close(case.subject.logits(case.text(1), photos, chunk), whole, 1e-5)


# --- kernels and graphs of the tower ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_fused_kernels_give_the_embeddings_of_the_tower_in_pytorch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = [make_photo(31, 33, 3)]
    expected = case.subject.embeddings(photos)[0]
    monkeypatch.setattr(case.subject.model, "ops", FusedVision())
    assert_close(case.subject.embeddings(photos)[0], expected, 1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_fused_kernels_give_the_embeddings_of_packed_images(name: str) -> None:
    make: Any = ROWS[name].small
    assert_fused_tower_equal(make, [Grid(1, 6, 6), Grid(1, 2, 2)])


@pytest.mark.parametrize("name", SMALL)
def test_captured_passes_give_the_embeddings_of_the_tower_in_pytorch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Any = ROWS[name].small
    assert_recorded_passes_equal(make, monkeypatch)


@pytest.mark.parametrize("name", SMALL)
def test_encoding_takes_the_memory_that_the_formula_says(name: str) -> None:
    make: Any = ROWS[name].small
    assert_encoding_memory(make)


# --- weights ------------------------------------------------------------------------------------------------------


# Cross-attention layers, of which `features` says nothing, are counted apart.
@pytest.mark.parametrize("case", [name for name in LAYOUTS if row_of(name).features], indirect=True)
def test_the_weights_that_are_planned_are_those_that_are_loaded(case: Case) -> None:
    held = case.subject.model.params.targets.items()
    matrices = (2, 4)  # dimensions; four where rows are stored in another order than they are used
    found = sum(tensor.numel() for name, tensor in held if name.startswith("decoder.") and tensor.dim() in matrices)
    assert found == costs.decoder_params(case.subject.config.text)
