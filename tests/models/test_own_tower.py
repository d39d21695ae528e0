"""Towers of Transformers whose layers are one of our kinds: they get ours, and compute what they did."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saccade.models import load_model
from saccade.models.bridge import load, own_tower
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.own_tower import OwnTower
from saccade.models.bridge.together import KINDS
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.types.media import Geometry, Grid, Size
from tests.helpers.families.zoo import ZOO

pytestmark = pytest.mark.transformers

CPU = torch.device("cpu")
SIZE = Size(180, 90)  # another than those that are tried at the start


def loaded(folder: Path) -> ModelBridge:
    model = load_model(folder, open_checkpoint(str(folder)).config, dtype=torch.float32, device=CPU, max_model_len=512)
    assert isinstance(model, ModelBridge)
    return model


def theirs(folder: Path) -> ModelBridge:
    with mock.patch.object(load, "use_own_tower", lambda *_: "not asked for"):
        return loaded(folder)


@torch.inference_mode()
def rows(model: ModelBridge) -> Tensor:
    """Embeddings of a picture."""
    noise = np.random.default_rng(3).integers(0, 256, (SIZE.height, SIZE.width, 3), np.uint8)
    return model.entrance.rows(model.images.inputs(model.images.rows(noise), SIZE))


def together(model: ModelBridge, sizes: tuple[Size, ...]) -> tuple[list[Tensor], int]:
    """What the engine gets of noise of these sizes, and how often the model's own code ran."""
    parts, geometries = [], []
    for size in sizes:
        pixels = np.random.default_rng(size.width).integers(0, 256, (size.height, size.width, 3), np.uint8)
        parts.append(model.prepare_on_host(pixels, size))
        geometries.append(Geometry(size, Grid(1, len(parts[-1]), 1), 1, 1))
    steps = model.encode_images(torch.cat(parts), geometries)
    with mock.patch.object(model.entrance, "rows", wraps=model.entrance.rows) as calls:
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return done.value, calls.call_count


def towers(model: ModelBridge) -> list[OwnTower]:
    return [part for part in model.model.modules() if isinstance(part, OwnTower)]


@pytest.mark.parametrize(
    "family",
    [
        "paddleocr_vl",  # RoPE by rows and columns
        "glm4v",  # RMS norms, gated MLPs, queries, keys and values in one matrix
        "internvl",  # gains of what a layer adds
        "gemma3",  # pictures as a batch
    ],
)
def test_a_tower_of_our_layers_computes_the_same(family: str, tmp_path: Path) -> None:
    folder = ZOO[family].build(tmp_path)
    model, expected = loaded(folder), theirs(folder)
    assert len(towers(model)) == 1 and not towers(expected)
    torch.testing.assert_close(rows(model), rows(expected), atol=1e-4, rtol=1e-4)
    many, calls = together(model, (SIZE, Size(64, 64), SIZE))
    assert calls == 1
    for found, size in zip(many, (SIZE, Size(64, 64), SIZE), strict=True):
        alone, _ = together(expected, (size,))
        torch.testing.assert_close(found, alone[0], atol=1e-4, rtol=1e-4)


def test_images_whose_inputs_cannot_stand_side_by_side_go_through_the_tower_one_by_one() -> None:
    one = {"input_ids": torch.zeros(1, 3), "pixels": torch.zeros(1, 3, 4, 4), "mode": "x"}
    other = {"input_ids": torch.zeros(1, 5), "pixels": torch.zeros(1, 3, 4, 6), "mode": "x"}
    first, *_, last = KINDS
    joined = last.join([one, one])
    assert joined["input_ids"].shape == (1, 6) and joined["pixels"].shape == (1, 6, 4, 4) and joined["mode"] == "x"
    with pytest.raises(RuntimeError, match="match"):
        first.join([one, other])
    for differs in ({"mode": "y"}, {"mode": torch.zeros(1)}, {"more": 1}):
        with pytest.raises(Unfit, match="inputs of images differ"):
            first.join([one, {**one, **differs}])
    small, large = Size(8, 8), Size(9, 9)
    assert list(first.groups([small, large, small])) == [3]
    assert list(last.groups([small, small, large, small])) == [2, 1, 1]
    assert list(first.groups([None, None])) == [1, 1], "blank ones have no size"


@torch.inference_mode()
def test_pictures_in_one_call_do_not_see_each_other_and_what_is_unknown_goes_to_their_layers(tmp_path: Path) -> None:
    (tower,) = towers(loaded(ZOO["paddleocr_vl"].build(tmp_path)))
    patches = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(20)[:, None] * torch.linspace(0.1, 1, 6)
    pair = (torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin())
    ends = torch.tensor([0, 8, 20])
    both = tower(patches, cu_seqlens=ends, position_embeddings=pair)
    first = tower(patches[:8], cu_seqlens=ends[:2], position_embeddings=(pair[0][:8], pair[1][:8]))
    torch.testing.assert_close(both[:8], first)
    with mock.patch.object(tower, "ops", None):
        masked = tower(patches, cu_seqlens=ends, position_embeddings=pair, more=torch.zeros(20, 20))
    torch.testing.assert_close(masked, both, atol=1e-5, rtol=1e-4)
    assert tower.num_by_theirs == 1


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("glm_ocr", "its tower's layers have attn.q_norm.weight, which ours have not"),
        ("got_ocr2", "its tower has no layers like ours"),
    ],
)
def test_a_tower_of_another_kind_stays_with_its_reason(
    family: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "saccade.models"):
        assert not towers(loaded(ZOO[family].build(tmp_path)))
    assert f"layers of its tower: Transformers' ({reason})" in caplog.text


def test_other_embeddings_keep_their_layers_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = ZOO["paddleocr_vl"].build(tmp_path)
    expected = rows(theirs(folder))
    with mock.patch.object(own_tower, "_angles", lambda _: None), caplog.at_level(logging.INFO, "saccade.models"):
        model = loaded(folder)
    assert "with our layers its embeddings differ by" in caplog.text and not towers(model)
    lists = [part for part in model.model.modules() if isinstance(part, nn.ModuleList)]
    assert any(type(part[0]).__name__ == "PaddleOCRVisionEncoderLayer" for part in lists)
    torch.testing.assert_close(rows(model), expected)
