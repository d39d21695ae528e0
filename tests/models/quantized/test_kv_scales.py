"""Scales of keys and values, by the names under which checkpoints have them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.models.quantized.kv_scales import kv_scales
from tests.helpers.families.published import PUBLISHED

TEXT = model_config({**PUBLISHED, "num_hidden_layers": 2}).text
PREFIX = "model.language_model.layers"


def folder_with(folder: Path, scales: dict[str, float | list[float]]) -> Path:
    tensors = {name: torch.tensor(value) for name, value in scales.items()}
    save_file({"model.norm.weight": torch.ones(4), **tensors}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_every_published_name_is_read(k: str, v: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, float | list[float]] = {f"{PREFIX}.0.{k}": 0.5, f"{PREFIX}.1.{k}": [0.25]}
    given |= {f"{PREFIX}.0.{v}": 0.125, f"{PREFIX}.1.{v}": 2.0, f"visual.layers.0.{k}": 9.0}
    with caplog.at_level(logging.INFO):
        found = kv_scales(folder_with(tmp_path, given), TEXT)
    assert found == ((0.5, 0.125), (0.25, 2.0))
    assert "scales of 2 layers from the checkpoint" in caplog.text


def test_the_older_scale_is_that_of_keys_and_values(tmp_path: Path) -> None:
    given: dict[str, float | list[float]] = {f"{PREFIX}.{i}.self_attn.kv_scale": 0.5 + i for i in range(2)}
    assert kv_scales(folder_with(tmp_path, given), TEXT) == ((0.5, 0.5), (1.5, 1.5))


def test_without_scales_they_are_one_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert kv_scales(folder_with(tmp_path, {}), TEXT) == ()
    assert "no scales of keys and values, so they are 1" in caplog.text
    assert kv_scales(None, TEXT) == ()


def test_scales_of_some_layers_alone_are_refused(tmp_path: Path) -> None:
    given: dict[str, float | list[float]] = {f"{PREFIX}.0.self_attn.{kind}_scale": 0.5 for kind in "kv"}
    with pytest.raises(ConfigError, match="k_scale and v_scale of 1 layers, and 2 have a KV cache"):
        kv_scales(folder_with(tmp_path, given), TEXT)


@pytest.mark.parametrize("value", [0.0, float("nan"), [0.5, 0.5]], ids=str)
def test_what_is_not_one_positive_number_is_refused_by_name(value: float | list[float], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {f"{PREFIX}.0.self_attn.k_scale": value})
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_scale must be one positive number"):
        kv_scales(folder, TEXT)
