"""Sizes, grids, token counts and positions equal to Transformers', over random sizes and limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_transforms import get_resize_output_image_size
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from benchmarks import checkpoints
from saccade.checkpoint.config import ModelConfig
from saccade.errors import ConfigError, RequestError
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import default_family, family_for
from saccade.processor.families.llava import Llava
from saccade.processor.families.qwen2_vl import Qwen2VL
from saccade.types.media import Geometry, Grid, Size
from saccade.types.prompt import Span

pytestmark = pytest.mark.transformers

SIDE = 28
# Small ones often, huge ones too; the ratio is cut where both sides refuse it.
sides = st.one_of(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 60_000))
pixel_limits = st.tuples(st.integers(1, 4_000_000), st.integers(1, 20_000_000)).map(sorted)


@dataclass
class Given:
    """A checkpoint with other settings."""

    config: ModelConfig
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="session")
def qwen(qwen2_vl_folder: Path) -> Qwen2VL:
    family = Qwen2VL.from_checkpoint(open_checkpoint(str(qwen2_vl_folder), weights=False))
    assert family == family_for(open_checkpoint(str(qwen2_vl_folder)).config).from_checkpoint(
        open_checkpoint(str(qwen2_vl_folder))
    )
    return family


@pytest.fixture(scope="session")
def llava_config(llava_folder: Path) -> ModelConfig:
    """Of a tower that does not say what it takes, so that image processors of all sizes belong to it."""
    config = open_checkpoint(str(llava_folder)).config
    assert config.vision
    return replace(config, vision=replace(config.vision, image_size=None))


@pytest.fixture(scope="session")
def llava(llava_folder: Path) -> Llava:
    return Llava.from_checkpoint(open_checkpoint(str(llava_folder)))


# --- Qwen2-VL: sizes ----------------------------------------------------------------------------------------------


@settings(max_examples=600, deadline=None)
@given(width=sides, height=sides, limits=pixel_limits)
def test_qwen_resizes_any_image_as_transformers_does(width: int, height: int, limits: list[int]) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    geometry = default_family().geometry(Size(width, height), *limits)
    expected = smart_resize(height, width, SIDE, min_pixels=limits[0], max_pixels=limits[1])
    assert (geometry.resized.height, geometry.resized.width) == expected
    assert geometry.grid == Grid(1, expected[0] // 14, expected[1] // 14)
    assert geometry.tokens == geometry.slots == expected[0] * expected[1] // SIDE**2


@settings(max_examples=100, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300), limits=st.sampled_from([(3136, 50176), (784, 7840)]))
def test_qwen_grids_equal_the_whole_processors(width: int, height: int, limits: tuple[int, int]) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    output = Qwen2VLImageProcessorPil(size=size)(Image.new("RGB", (width, height)), return_tensors="np")
    geometry = default_family().geometry(Size(width, height), *limits)
    assert output["image_grid_thw"].tolist() == [list(geometry.grid)]
    assert output["pixel_values"].shape[0] == geometry.grid.patches


@pytest.mark.parametrize("size", [Size(1, 201), Size(30_000, 1), Size(2001, 10)])
def test_extreme_aspect_ratios_are_refused_by_both_families(llava: Llava, size: Size) -> None:
    for family in (default_family(), llava):
        with pytest.raises(RequestError, match=f"{size.width}x{size.height}") as caught:
            family.geometry(size, 3136, 100_000)
        assert caught.value.code == "image_too_large"


@pytest.mark.parametrize("size", [Size(1, 1), Size(1, 3), Size(3, 1), Size(2, 2), Size(1, 200)])
def test_tiny_images_are_enlarged(size: Size) -> None:
    assert default_family().geometry(size, 3136, 100_000).tokens >= 4


def test_half_the_sides_cost_a_quarter_of_the_tokens() -> None:
    family = default_family()
    whole, half = (family.geometry(Size(1120 // n, 896 // n), *family.policy(None, None)).tokens for n in (1, 2))
    assert (whole, half) == (1280, 320)


@settings(max_examples=400, deadline=None)
@given(width=sides, height=sides, limits=pixel_limits)
def test_no_image_costs_more_than_the_largest(width: int, height: int, limits: list[int]) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    family = default_family()
    assert family.geometry(Size(width, height), *limits).tokens <= family.largest(*limits).tokens


@settings(max_examples=200, deadline=None)
@given(short=st.integers(1, 60), ratio=st.floats(1, 200), lowest=st.integers(1, 200_000))
def test_not_even_a_thin_strip_costs_more_than_the_largest(short: int, ratio: float, lowest: int) -> None:
    family = default_family()
    geometry = family.geometry(Size(int(short * ratio), short), lowest, lowest)
    assert geometry.tokens <= family.largest(lowest, lowest).tokens


def test_the_largest_image_is_reached_under_usual_limits() -> None:
    family = default_family()
    largest = family.largest(3136, 1003520)
    assert largest.tokens == 1280
    assert family.geometry(largest.resized, 3136, 1003520) == largest


# --- Qwen2-VL: settings -------------------------------------------------------------------------------------------


def with_settings(qwen2_vl_folder: Path, **image_processor: Any) -> Qwen2VL:
    return Qwen2VL.from_checkpoint(Given(open_checkpoint(str(qwen2_vl_folder)).config, image_processor))


@pytest.mark.parametrize(
    "given_settings",
    [
        {"min_pixels": 784, "max_pixels": 7840},
        {"size": {"shortest_edge": 784, "longest_edge": 7840}},
        {"size": {"min_pixels": 784, "max_pixels": 7840}},
        {"min_pixels": 784, "max_pixels": 7840, "size": {"shortest_edge": 1, "longest_edge": 2}},
    ],
)
def test_pixel_limits_are_read_in_every_dialect(qwen2_vl_folder: Path, given_settings: dict[str, Any]) -> None:
    assert with_settings(qwen2_vl_folder, **given_settings).policy(None, None) == (784, 7840)


def test_a_silent_checkpoint_has_the_processors_defaults(qwen2_vl_folder: Path) -> None:
    family = with_settings(qwen2_vl_folder)
    assert family.policy(None, None) == (56 * 56, 28 * 28 * 1280)
    assert (family.patch_size, family.merge_size) == (14, 2)


def test_a_deployment_overrides_the_checkpoint(qwen: Qwen2VL) -> None:
    assert qwen.policy(4000, 50_000) == (4000, 50_000)
    assert qwen.policy(None, 1000) == (1000, 1000)  # below the checkpoint's own minimum


def test_a_minimum_above_the_maximum_is_refused_with_both(qwen: Qwen2VL) -> None:
    with pytest.raises(ConfigError, match="min_pixels=2000000 is above max_pixels=1003520"):
        qwen.policy(2_000_000, None)


def test_every_setting_changes_the_tag(qwen: Qwen2VL, qwen2_vl_folder: Path) -> None:
    other = with_settings(qwen2_vl_folder, image_mean=[0.5, 0.5, 0.5])
    tags = {qwen.policy_tag(1, 2), qwen.policy_tag(1, 3), qwen.policy_tag(2, 3), other.policy_tag(1, 2)}
    assert len(tags) == 4


def test_a_processor_that_does_not_resize_is_refused(qwen2_vl_folder: Path) -> None:
    with pytest.raises(ConfigError, match="do_resize"):
        with_settings(qwen2_vl_folder, do_resize=False)


# --- Qwen2-VL: positions ------------------------------------------------------------------------------------------


def reference_positions(pieces: list[int | Grid]) -> tuple[torch.Tensor, int]:
    """Transformers' own, for text lengths and grids in prompt order."""
    runs = [(0, p) if isinstance(p, int) else (1, p.patches // 4) for p in pieces]
    kinds = torch.tensor([[kind for kind, length in runs for _ in range(length)]])
    grids = torch.tensor([list(p) for p in pieces if isinstance(p, Grid)] or [[0, 0, 0]])
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *a, **k: Qwen2VLModel.get_vision_position_ids(model, *a, **k)
    positions, deltas = Qwen2VLModel.get_rope_index(model, torch.zeros_like(kinds), kinds, image_grid_thw=grids)
    return positions[:, 0], int(deltas[0, 0]) + kinds.shape[1]


def of_grid(grid: Grid) -> Geometry:
    return Geometry(Size(1, 1), grid, grid.patches // 4, grid.patches // 4)


grids = st.builds(lambda h, w: Grid(1, 2 * h, 2 * w), st.integers(1, 12), st.integers(1, 12))


@settings(max_examples=100, deadline=None)
@given(first=st.integers(0, 9), images=st.lists(st.tuples(grids, st.integers(1, 9)), max_size=4))
def test_qwen_positions_equal_transformers(qwen: Qwen2VL, first: int, images: list[tuple[Grid, int]]) -> None:
    assume(first or images)
    pieces: list[int | Grid] = [first, *(piece for pair in images for piece in pair)]
    spans, at = [], first
    for grid, text in images:
        spans.append(Span(at, grid.patches // 4, bytes(32), grid.patches // 4))
        at += grid.patches // 4 + text
    positions, following = qwen.positions([0] * at, spans, [of_grid(grid) for grid, _ in images])
    expected, expected_following = reference_positions(pieces)
    assert positions.dtype == np.int32
    assert positions.tolist() == expected.tolist()
    assert following == expected_following


def test_a_image_at_the_very_end_moves_the_next_position_by_its_longer_side(qwen: Qwen2VL) -> None:
    _, following = qwen.positions([0] * 8, [Span(2, 6, bytes(32), 6)], [of_grid(Grid(1, 4, 6))])
    assert following == 2 + 3


# --- LLaVA --------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(width=sides, height=sides, short=st.sampled_from([14, 56, 224, 336]))
def test_llava_resizes_any_image_as_transformers_does(
    llava_config: ModelConfig, width: int, height: int, short: int
) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    family = Llava.from_checkpoint(Given(llava_config, {"size": {"shortest_edge": short}, "crop_size": short}))
    geometry = family.geometry(Size(width, height), 1, 1)
    # The shape is all that function looks at, so no raster is made.
    stand_in = np.broadcast_to(np.uint8(0), (3, height, width))
    expected = get_resize_output_image_size(
        stand_in, short, default_to_square=False, input_data_format="channels_first"
    )
    assert (geometry.resized.height, geometry.resized.width) == expected


@settings(max_examples=50, deadline=None)
@given(width=st.integers(1, 120), height=st.integers(1, 120))
def test_llava_grids_equal_the_whole_processors(llava: Llava, width: int, height: int) -> None:
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    pixels = processor(Image.new("RGB", (width, height)), return_tensors="np")["pixel_values"]
    geometry = llava.geometry(Size(width, height), 1, 1)
    assert (geometry.grid.h * 14, geometry.grid.w * 14) == pixels.shape[-2:]
    assert geometry.tokens == 16


@pytest.mark.parametrize(
    ("processor", "raw_strategy", "tokens"),
    [
        ({"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}, None, 576),
        ({"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "full"}, None, 577),
        ({"patch_size": 14, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"}, None, 576),
        ({}, "default", 576),  # from before processors knew the patch size
        ({}, "full", 577),
        ({}, None, 576),
    ],
)
def test_llava_tokens_are_patches_and_what_the_checkpoint_adds(
    llava_config: ModelConfig, processor: dict[str, Any], raw_strategy: str | None, tokens: int
) -> None:
    raw = {"vision_feature_select_strategy": raw_strategy} if raw_strategy else {}
    config = SimpleNamespace(vision=llava_config.vision, image_token_id=7, raw=raw)
    family = Llava.from_checkpoint(Given(config, {"size": 336, "crop_size": 336}, processor))  # type: ignore[arg-type]
    assert family.geometry(Size(640, 480), 1, 1).tokens == family.largest(1, 1).tokens == tokens


def test_llava_settings_that_lose_a_patch_are_refused(llava_config: ModelConfig) -> None:
    processor = {"patch_size": 14, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "default"}
    with pytest.raises(ConfigError, match="num_additional_image_tokens"):
        Llava.from_checkpoint(Given(llava_config, {}, processor))


@pytest.mark.parametrize(
    "size",
    [{"size": 336, "crop_size": 336}, {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}],
)
def test_llava_sizes_are_read_in_both_dialects(llava_config: ModelConfig, size: dict[str, Any]) -> None:
    family = Llava.from_checkpoint(Given(llava_config, size))
    assert family.geometry(Size(1000, 500), 1, 1).resized == (672, 336)
    assert family.geometry(Size(1000, 500), 1, 1).grid == Grid(1, 24, 24)


def test_llava_without_a_crop_stretches_to_one_size(llava_config: ModelConfig) -> None:
    stretch = {"size": {"height": 336, "width": 336}, "do_center_crop": False}
    assert Llava.from_checkpoint(Given(llava_config, stretch)).geometry(Size(640, 480), 1, 1).resized == (336, 336)


def test_llava_stretches_where_its_processor_knows_no_crop(llava_config: ModelConfig) -> None:
    """SigLIP's, as LLaVA-Interleave has it: its file says nothing of crops."""
    stretch = {"size": {"height": 336, "width": 336}, "do_resize": True, "do_convert_rgb": None, "resample": 3}
    family = Llava.from_checkpoint(Given(llava_config, stretch))
    assert family.geometry(Size(640, 480), 1, 1).resized == family.crop == (336, 336)


@pytest.mark.parametrize(
    "wrong", [{"do_pad": True}, {"do_resize": False}, {"do_center_crop": False, "size": {"shortest_edge": 336}}]
)
def test_llava_settings_that_give_no_single_size_are_refused(llava_config: ModelConfig, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Llava.from_checkpoint(Given(llava_config, wrong))


def test_llava_ignores_a_deployments_pixel_limits(llava: Llava) -> None:
    assert llava.policy(1, 2) == llava.policy(None, None) == (56 * 56, 56 * 56)
    assert llava.is_fixed_size


def test_llava_positions_count_up(llava: Llava) -> None:
    positions, following = llava.positions([0] * 5, [Span(1, 3, bytes(32), 3)], [of_grid(Grid(1, 4, 4))])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] and following == 5


# --- both ---------------------------------------------------------------------------------------------------------


def test_a_image_expands_to_its_placeholder_repeated(qwen: Qwen2VL, llava: Llava) -> None:
    for family in (qwen, llava):
        geometry = family.geometry(Size(100, 80), *family.policy(None, None))
        expansion = family.expand(geometry)
        assert expansion.token_ids.tolist() == [family.image_token_id] * geometry.tokens
        assert expansion.is_embed is None


@pytest.mark.parametrize("layout", ["saved", "published"])
def test_both_layouts_give_the_same_family(tmp_path: Path, layout: str, qwen: Qwen2VL) -> None:
    folder = checkpoints.qwen2_vl(tmp_path, layout=layout)
    assert Qwen2VL.from_checkpoint(open_checkpoint(str(folder))) == qwen


@pytest.mark.parametrize("family", [Qwen2VL, Llava])
def test_a_config_without_a_vision_part_is_refused(family: Any) -> None:
    config: Any = SimpleNamespace(vision=None, image_token_id=None, raw={})
    with pytest.raises(ConfigError, match="no vision_config"):
        family.from_checkpoint(Given(config))
