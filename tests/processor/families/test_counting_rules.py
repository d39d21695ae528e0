"""Counting rules of models that run through Transformers: where they count, and what becomes of one that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.checkpoint.hf_processor import load_processor, placeholder, processed
from saccade.cli.count import count_files
from saccade.errors import ConfigError
from saccade.models.bridge.images import ImageInputs
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import Checkpoint, open_checkpoint
from saccade.processor.families import counting_rules, family_for
from saccade.processor.families.counting_rules import Rule
from saccade.processor.families.fallback import Fallback
from saccade.processor.families.ruled import Ruled
from saccade.types.media import Size
from tests.helpers.families.counting import Pair, published, sizes
from tests.helpers.families.zoo import ZOO

SIZES = [Size(512, 384), Size(1280, 720), Size(300, 800), Size(64, 64)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of one size, rounded, in tiles, with row numbers."""
    names = ("gemma3", "glm46v", "internvl", "smolvlm")
    return {name: ZOO[name].build(tmp_path_factory.mktemp(name)) for name in names}


def opened(folder: Path, **how: bool) -> Checkpoint:
    return open_checkpoint(str(folder), weights=False, **how)


@pytest.mark.parametrize("name", ["gemma3", "glm46v", "internvl", "smolvlm"])
def test_a_rule_counts_as_its_processor(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    assert Pair.of(folders[name]).differences(sizes(12, 11.0)) == []
    if name in ("glm46v", "internvl"):
        pair = Pair.of(published(folders[name], name, tmp_path / "published"))
        assert pair.differences(sizes(3, 11.0)) == []


@pytest.mark.parametrize("name", ["gemma3", "glm46v", "internvl", "smolvlm"])
def test_a_server_counts_by_the_rule_and_writes_the_same_tokens(folders: dict[str, Path], name: str) -> None:
    checkpoint = opened(folders[name])
    ruled = Fallback.from_checkpoint(checkpoint)
    with mock.patch.object(counting_rules, "TABLE", {"models": {}}):
        asked = Fallback.from_checkpoint(checkpoint)
    assert ruled.rule is not None and asked.rule is None
    for size in SIZES:
        one, other = ruled.count(size), asked.count(size)
        assert one.values == other.values
        assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.kinds, other.kinds)
        limits = ruled.policy(None, None)
        assert ruled.geometry(size, *limits) == asked.geometry(size, *asked.policy(None, None))


@pytest.mark.parametrize("name", ["gemma3", "glm46v", "internvl", "smolvlm"])
def test_a_bill_on_paper_is_the_servers(folders: dict[str, Path], name: str) -> None:
    paper, server = (opened(folders[name], on_paper=is_paper) for is_paper in (True, False))
    rules, family = family_for(paper.config).from_checkpoint(paper), Fallback.from_checkpoint(server)
    assert isinstance(rules, Ruled)
    limits = rules.policy(None, None)
    counts = [rules.geometry(size, *limits).tokens for size in SIZES]
    assert counts == [family.geometry(size, *limits).tokens for size in SIZES]


def test_a_count_of_such_a_model_imports_neither_torch_nor_transformers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    Image.new("RGB", (640, 480)).save(picture)
    code = (
        "import sys; from saccade.cli.main import main; "
        f"code = main(['count', '--model', {str(folders['internvl'])!r}, {str(picture)!r}]); "
        "sys.exit(code or {'torch', 'transformers'} & sys.modules.keys() != set())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_rule_that_differs_is_dropped_with_a_line(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(Rule, "side", 42):
        family = Fallback.from_checkpoint(opened(folders["glm46v"]))
    assert family.rule is None and family.is_fixed_size
    assert "differs from the checkpoint's processor at 64x64" in caplog.text
    assert family.count(SIZES[0]).token_ids.size == 54


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_processor_type": "OtherImageProcessor"}, "'OtherImageProcessor' has no counting rule"),
        ({"do_resize": False}, "do_resize=false"),
        ({"patch_size": "small"}, "settings are not those that"),
        ({"max_patches": 10**9}, "max_patches=1000000000, and at most 1000 are counted"),  # grids of so many
    ],
)
def test_settings_that_a_rule_does_not_know_are_refused(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    folder = published(folders["glm46v"], "glm46v", tmp_path / "changed")
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"] |= changes
    file.write_text(json.dumps(settings))
    checkpoint = opened(folder, on_paper=True)
    with pytest.raises(ConfigError, match=words):
        family_for(checkpoint.config).from_checkpoint(checkpoint)


# --- limits of pixels ---------------------------------------------------------------------------------------------


def test_pixel_limits_make_pictures_smaller_or_larger(folders: dict[str, Path]) -> None:
    family = Fallback.from_checkpoint(opened(folders["glm46v"]))
    assert family.policy(None, None) == (56 * 28, 224 * 224)
    whole, small = (family.geometry(Size(512, 384), *family.policy(None, most)) for most in (None, 20_000))
    assert (whole.resized, whole.tokens) == (Size(512, 384), 54)
    assert (small.resized, small.tokens) == (Size(140, 112), 20)
    assert family.geometry(Size(64, 64), *family.policy(20_000, None)).tokens == 36
    assert family.policy_tag(1, 2) != family.policy_tag(1, 3)


def test_pixel_limits_outside_the_processors_own_are_refused(folders: dict[str, Path]) -> None:
    family = Fallback.from_checkpoint(opened(folders["glm46v"]))
    with pytest.raises(ConfigError, match="1568 to 50176 pixels"):
        family.policy(None, 1000)
    with pytest.raises(ConfigError, match="min_pixels=60000 is above max_pixels=50176"):
        family.policy(60_000, None)
    assert family.policy(None, 10_000_000) == (1568, 50_176)


def test_a_picture_under_limits_is_what_its_processor_makes_under_them(folders: dict[str, Path]) -> None:
    checkpoint = opened(folders["glm46v"])
    family = Fallback.from_checkpoint(checkpoint)
    pixels = np.random.default_rng(0).integers(0, 256, (384, 512, 3), np.uint8)
    geometry = family.geometry(Size(512, 384), *family.policy(None, 20_000))
    processor = load_processor(checkpoint.path, "glm46v")
    place = placeholder(processor, checkpoint.config)
    inputs = ImageInputs(processor, place, family.patch_dim, torch.float32, torch.device("cpu"))
    rows = inputs.rows_of(pixels, geometry.resized)
    processor.image_processor.size["longest_edge"] = 40_000  # of two frames
    expected = processed(processor, place.written, Image.fromarray(pixels))["pixel_values"]
    assert torch.equal(rows.reshape(expected.shape), expected)


def test_options_reach_the_rule(folders: dict[str, Path]) -> None:
    picture = folders["glm46v"] / "picture.png"
    Image.new("RGB", (512, 384)).save(picture)
    for most, tokens in ((None, 54), (20_000, 20)):
        rows, _ = count_files([str(picture)], Options(model=str(folders["glm46v"]), max_pixels=most))
        assert [row.tokens for row in rows] == [tokens]
