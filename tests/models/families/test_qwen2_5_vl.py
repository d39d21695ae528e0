"""Qwen2.5-VL against Transformers: sizes, positions, windows, features, logits; and the tower's cost formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_window_index

from saccade import costs
from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.kernels.ops import vit_elementwise
from saccade.models import load_model
from saccade.models.families.qwen2_5_vl import all_windows, pack
from saccade.models.layers.activation import silu_and_mul
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters
from saccade.models.weights import fill_random
from saccade.types.media import Grid
from tests.helpers.families.family_qwen2_5_vl import PUBLISHED_7B, build
from tests.helpers.families.parity import CPU, Pair, assert_close, finish, our_logits, prompt, their_logits
from tests.helpers.families.qwen_checks import (
    random,
)

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module", params=["saved", "published"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(build(tmp_path_factory.mktemp("qwen2_5_vl"), layout=request.param))


# --- what a picture costs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("family"))


# --- the tower ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    side=st.integers(1, 4),
)
def test_windows_are_those_of_transformers(shapes: list[tuple[int, int, int]], side: int) -> None:
    grids = [Grid(t, 2 * h, 2 * w) for t, h, w in shapes]
    ours = all_windows(grids, 2, side)
    order, ends = get_vision_window_index(torch.tensor(grids), 2, side * 28, 14)
    assert ours.order.tolist() == order.tolist()
    assert (np.cumsum(ours.tokens) * 4).tolist() == ends[1:].tolist()


def test_what_is_said_of_packed_images_is_made_once_for_the_same_grids() -> None:
    grids = (Grid(1, 10, 6), Grid(2, 4, 4))
    packing, tokens = pack(grids, 2, 2), (60 + 32) // 4
    assert pack((Grid(1, 10, 6), Grid(2, 4, 4)), 2, 2) is packing is not pack(grids[::-1], 2, 2)
    order, back = packing.orders.long()
    assert order[back].tolist() == back[order].tolist() == list(range(tokens))
    assert sum(packing.windows) == sum(packing.frames) == len(packing.cells) == 4 * tokens


def test_image_features_equal_those_of_transformers(pair: Pair) -> None:
    grids = [Grid(1, 10, 6), Grid(1, 4, 4), Grid(2, 6, 2)]
    patches = torch.randn(sum(grid.patches for grid in grids), 3 * 2 * 14 * 14)
    with torch.inference_mode():
        ours = finish(pair.ours.encode(patches, grids))
        theirs = pair.theirs.get_image_features(patches, torch.tensor(grids)).pooler_output
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        ({}, {"fullatt_block_indexes": []}),
        ({}, {"fullatt_block_indexes": [0, 1, 2]}),
        ({}, {"window_size": 112}),
        ({"num_key_value_heads": 4}, {"intermediate_size": 64}),
    ],
    ids=["windows only", "full layers only", "larger windows", "no shared heads"],
)
def test_variants_of_the_config_match(tmp_path: Path, text: dict[str, Any], vision: dict[str, Any]) -> None:
    pair = Pair(build(tmp_path, text=text, vision=vision))
    images = pair.images(2)
    ids = prompt(pair, images)
    assert_close(our_logits(pair, ids, images), their_logits(pair, ids, images))


# --- on a device --------------------------------------------------------------------------------------------------


def test_the_fused_rms_norm_leaves_its_input_with_the_bias_added() -> None:
    x, weight, added = random(5, 96), random(96), random(96) - 1
    normed = torch.nn.functional.rms_norm(x, (96,), weight, 1e-6)
    expected = x + added
    found = vit_elementwise.rms_norm_and_add(x, weight, 1e-6, added)
    torch.testing.assert_close(found, normed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x, expected)


def test_the_fused_gate_is_the_plain_one() -> None:
    x = random(5, 2 * 1100)
    expected = silu_and_mul(x.clone())
    torch.testing.assert_close(vit_elementwise.silu_and_mul(x), expected, atol=1e-6, rtol=1e-5)


def test_padding_inside_a_pair_of_products_changes_no_result() -> None:
    params = Parameters(torch.float32, CPU)
    up = Linear(params.within("up"), 6, {"gate": 11, "up": 11}, bias=True, pad_outputs=8)
    down = Linear(params.within("down"), 11, 6, bias=True, pad_inputs=8)
    fill_random(params.targets, 0)
    own = params.targets
    x = random(3, 6).cpu()
    gate, more = (x @ own[f"up.{part}.weight"].T + own[f"up.{part}.bias"] for part in ("gate", "up"))
    expected = (torch.nn.functional.silu(gate) * more) @ own["down.weight"].T
    assert up.weight.shape == (32, 6) and down.weight.shape == (6, 16)
    torch.testing.assert_close(down(silu_and_mul(up(x))), expected)


# --- published configs --------------------------------------------------------------------------------------------


def test_the_published_config_is_read_with_its_windows_and_its_size() -> None:
    config = model_config(PUBLISHED_7B)
    vision = config.vision
    assert vision is not None
    assert (vision.is_gated, vision.window_tokens, vision.full_layers) == (True, 4, (7, 15, 23, 31))
    assert config.text.mrope_section == (16, 24, 24)
    assert costs.weight_bytes(config, "bfloat16") == pytest.approx(16.58e9, rel=1e-3)  # as the hub's index says


def test_text_fields_written_in_both_places_are_read_like_flat_ones() -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    nested = {name: PUBLISHED_7B[name] for name in (*names, "vocab_size", "max_position_embeddings", "rope_theta")}
    rope = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    text = {
        **nested,
        "rope_scaling": rope,
        "video_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 32768,
    }
    both, flat = model_config({**PUBLISHED_7B, "text_config": text}), model_config(PUBLISHED_7B)
    assert (both.vision, both.video_token_id) == (flat.vision, flat.video_token_id)
    assert replace(both.text, rope_scaling=flat.text.rope_scaling) == flat.text


def test_windows_save_most_of_the_attention() -> None:
    config = model_config(PUBLISHED_7B)
    vision = config.vision
    assert vision is not None
    assert costs.attended_patches(vision, 6256) == 4 * 6256 + 28 * 64
    assert costs.attended_patches(vision, 16) == 32 * 16


def test_a_tower_without_windows_is_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"]["window_size"] = 8
    with pytest.raises(ConfigError, match=r"window_size=8.*token of 28 pixels"):
        load_model(None, model_config(raw), dtype=torch.float32, device=CPU, load_format="dummy")
