"""Qwen3-VL against Transformers: sizes, positions, deep features, logits; and what wider embeddings cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from saccade import costs
from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.kernels.ops import vit_elementwise
from saccade.models import load_model
from saccade.models.families.qwen3_vl import Positions
from saccade.models.layers.activation import tanh_gelu
from saccade.models.layers.rotary_embedding import Rotary
from saccade.models.state_dict import Parameters
from saccade.models.vision.blocks import by_token
from saccade.models.weights import fill_random
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import family_for
from saccade.types.media import Grid
from tests.helpers.families.family_qwen3_vl import PUBLISHED_4B, build
from tests.helpers.families.parity import CPU, Pair, assert_close, finish, our_logits, prompt, their_logits
from tests.helpers.families.qwen_checks import (
    random,
)

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module", params=["saved", "published"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(build(tmp_path_factory.mktemp("qwen3_vl"), layout=request.param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("family"), layout="published")


# --- what a picture costs -----------------------------------------------------------------------------------------


def test_pixel_limits_are_the_edges_of_the_published_size(folder: Path) -> None:
    files = open_checkpoint(str(folder), weights=False)
    family = family_for(files.config).from_checkpoint(files)
    assert family.policy(None, None) == (64 * 64, 32 * 32 * 1280)
    assert family.largest(*family.policy(None, None)).tokens == 1280


# --- the tower ----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(h=st.integers(1, 12), w=st.integers(1, 12))
def test_learned_positions_are_stretched_as_in_transformers(h: int, w: int) -> None:
    params = Parameters(torch.float32, CPU)
    positions = Positions(params, 49, 8)
    fill_random(params.targets, 0)
    grid = Grid(1, 2 * h, 2 * w)
    indices, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), 7, align_corners=True, spatial_merge_size=2
    )
    expected = (positions.table[indices] * weights[..., None]).sum(1)
    torch.testing.assert_close(by_token(positions.interpolated(grid), 2), expected, atol=1e-5, rtol=1e-5)


def test_image_features_of_all_depths_equal_those_of_transformers(pair: Pair) -> None:
    grids = [Grid(1, 10, 6), Grid(1, 4, 4), Grid(2, 6, 2)]
    patches = torch.randn(sum(grid.patches for grid in grids), 3 * 2 * 16 * 16)
    with torch.inference_mode():
        ours = finish(pair.ours.encode(patches, grids))
        theirs = pair.theirs.model.get_image_features(patches, torch.tensor(grids))
    expected = [theirs.pooler_output, *theirs.deepstack_features]
    for index, mine in enumerate(ours):
        assert mine.shape == (grids[index].patches // 4, 3 * 64)
        for part, other in zip(mine.split(64, dim=1), expected, strict=True):
            assert_close(part, other[index])


# --- the decoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        ({}, {"deepstack_visual_indexes": []}),
        ({}, {"deepstack_visual_indexes": [1, 2, 3]}),
        ({"attention_bias": True}, {}),
        ({"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": None}, {"num_position_embeddings": 400}),
    ],
    ids=["nothing deep", "the last layer too", "biases", "other heads"],
)
def test_variants_of_the_config_match(tmp_path: Path, text: dict[str, Any], vision: dict[str, Any]) -> None:
    if "rope_parameters" in text:
        sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        text = {**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections}}
    pair = Pair(build(tmp_path, text=text, vision=vision))
    images = pair.images(2)
    ids = prompt(pair, images)
    assert_close(our_logits(pair, ids, images), their_logits(pair, ids, images))


def test_axes_take_turns_until_theirs_are_used_up() -> None:
    axes = Rotary(model_config(PUBLISHED_4B).text, CPU).axes.tolist()
    assert axes == [0, 1, 2] * 20 + [0] * 4


def test_text_has_zeros_where_images_have_deep_vectors(pair: Pair) -> None:
    rows = pair.ours.embed(torch.tensor([3, 4]))
    assert rows.shape == (2, 3 * 64)
    assert torch.equal(rows[:, :64], pair.ours.decoder.table[3:5])
    assert not rows[:, 64:].any()


def test_rows_without_deep_vectors_give_the_same_as_rows_with_zeros(pair: Pair) -> None:
    ids = prompt(pair, [])
    whole = our_logits(pair, ids, [])
    pair.ours.decoder.embedding_size = 64
    try:
        assert torch.equal(our_logits(pair, ids, []), whole)
    finally:
        pair.ours.decoder.embedding_size = 3 * 64


# --- on a device --------------------------------------------------------------------------------------------------


def test_the_fused_activation_is_the_plain_one() -> None:
    x = random(33, 129) * 4
    expected = tanh_gelu(x.clone())
    torch.testing.assert_close(vit_elementwise.tanh_gelu(x), expected, atol=1e-5, rtol=1e-5)


# --- published configs --------------------------------------------------------------------------------------------


def test_the_published_config_is_read_with_its_deep_layers_and_its_size() -> None:
    config = model_config(PUBLISHED_4B)
    vision = config.vision
    assert vision is not None
    assert (vision.deepstack_layers, vision.is_gated, vision.window_tokens) == ((5, 11, 17), False, None)
    assert config.text.num_deepstack == 3
    assert costs.weight_bytes(config, "bfloat16") == pytest.approx(8.88e9, rel=5e-3)  # 4.44 billion parameters


def test_an_embedding_of_a_image_is_billed_with_all_its_vectors() -> None:
    config = model_config(PUBLISHED_4B)
    assert costs.embedding_bytes_per_slot(config.text, "bfloat16") == 4 * 2560 * 2


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("vision_config", {"num_position_embeddings": 26}, "num_position_embeddings=26 is not the area of a square"),
        ("text_config", {"num_hidden_layers": 1}, "names 2 layers, the decoder has 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_its_values(
    folder: Path, part: str, changes: dict[str, Any], said: str
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw[part].update(changes)
    with pytest.raises(ConfigError, match=said):
        load_model(None, model_config(raw), dtype=torch.float32, device=CPU, load_format="dummy")
