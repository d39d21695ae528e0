"""Checkpoints whose JSON files say nonsense: one sentence that names the file and the value, before memory is planned.

A small fuzzer: every value of every file of every family is left out or replaced by one of another kind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.checkpoint.config import check_values, model_config
from saccade.checkpoint.schema import CONFIG, IMAGES, first_wrong
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import Checkpoint, open_checkpoint
from saccade.processor.families import FAMILIES as KNOWN
from saccade.processor.families import video_rules_for
from saccade.processor.images import Images
from tests.helpers.families.families import FAMILIES

pytestmark = pytest.mark.transformers

FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "generation_config.json")
GONE = object()
VALUES = (GONE, 0, -1, 1.5, "x", [], {}, None, 10**12, 10**400)
IGNORED = {"transformers_version", "architectures", "initializer_range", "attention_dropout", "use_cache"}
NATIVE = sorted(name for name in FAMILIES if name in KNOWN or name in ("pixtral", "ministral3", "qwen_vl"))

Place = tuple[str | int, ...]


def places(value: Any, inside: Place = ()) -> Iterator[Place]:
    """Of all values in a file, those in objects and lists included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        if name not in IGNORED:
            yield (*inside, name)
            yield from places(part, (*inside, name))


def changed(value: Any, place: Place, new: Any) -> Any:
    value = json.loads(json.dumps(value))
    *outer, last = place
    part = value
    for name in outer:
        part = part[name]
    if new is GONE:
        del part[last]
    else:
        part[last] = new
    return value


def changes(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """A few for each value, by turns: file, what was done, the whole file."""
    turn = 0
    for file in FILES:
        if (folder / file).is_file():
            whole = json.loads((folder / file).read_text())
            for place in places(whole):
                for new in (VALUES[turn % len(VALUES)], VALUES[(turn + 4) % len(VALUES)]):
                    yield file, f"{place} = {new!r}", changed(whole, place, new)
                turn += 1


def load(folder: Path) -> None:
    """All that reads settings, up to weights."""
    checkpoint = open_checkpoint(str(folder), weights=False)
    images = Images(checkpoint, MediaPolicy.of(Options()))
    video_rules_for(checkpoint)
    images.largest()
    build(checkpoint)


def build(checkpoint: Checkpoint) -> None:
    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("meta"), "load_format": "dummy"}
    load_model(None, checkpoint.config, image_processor=checkpoint.image_processor, **how)


@pytest.mark.parametrize("name", NATIVE)
def test_nonsense_in_a_checkpoints_files_is_one_error_of_the_operator_or_harmless(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.models.fill_random", lambda *_: None)  # there are no values on a meta device
    source, folder = tmp_path / "whole", tmp_path / "changed"
    source.mkdir()
    FAMILIES[name].build(source)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    load(folder)
    num_refused, raw = 0, []
    for file, what, text in changes(source):
        (folder / file).write_text(json.dumps(text))
        try:
            load(folder)
        except ConfigError:
            num_refused += 1
        except Exception as error:
            raw.append(f"{file} {what}: {error!r}")
        (folder / file).write_text((source / file).read_text())
    assert not raw
    assert num_refused > 40


# --- what is said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": "x"}, "hidden_size is 'x', but a whole number from 1 to 16777216 is needed"),
        ({"hidden_size": True}, "hidden_size is True, but a whole number"),
        ({"text_config": 3}, "text_config is 3, but an object is needed"),
        ({"vision_config": {"patch_size": 0}}, "vision_config.patch_size is 0, but a whole number from 1"),
        ({"rope_scaling": {"mrope_section": [2, "x"]}}, "rope_scaling.mrope_section is [2, 'x'], but a list of"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, but a number of at least 0 is needed"),
        ({"vision_config": {"in_chans": 4}}, "vision_config.in_chans is 4, but 3 is needed"),
        ({"layer_types": [0] * 99}, f"layer_types is {str([0] * 99)[:80]}..., but a list of a string is needed"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_is_needed(values: dict[str, Any], said: str) -> None:
    assert (first_wrong(values, CONFIG) or "").startswith(said)


def test_null_and_unknown_names_are_let_through() -> None:
    check_values("preprocessor_config.json", {"size": None, "do_pad": None, "anything": object()}, IMAGES)


def test_the_file_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^preprocessor_config.json: image_std is \[1, 0, 1\], but a list of 3 times"
    ):
        check_values("preprocessor_config.json", {"image_std": [1, 0, 1]}, IMAGES)


SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 4},
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"hidden_size": 66}, "hidden_size=66 is not divided by num_attention_heads=4"),
        ({"head_dim": 15}, "heads have 15 values"),
        ({"vision_config": {**SMALL["vision_config"], "num_heads": 5}}, "width 48 does not divide into 5 heads"),
        ({"vision_config": {**SMALL["vision_config"], "image_size": 7}}, "image_size=7 is less than one patch_size=14"),
        ({"vision_config": {**SMALL["vision_config"], "image_size": [56, 28]}}, r"image_size \[56, 28\] is no square"),
    ],
)
def test_values_that_do_not_go_together_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_config({**SMALL, **given})


def test_a_null_that_is_an_answer_is_kept_and_others_leave_the_default() -> None:
    shape = {**SMALL, "model_type": "mistral", "vision_config": {**SMALL["vision_config"], "patch_size": None}}
    config = model_config({**shape, "sliding_window": None, "num_key_value_heads": None, "rope_theta": None})
    assert (config.text.window, config.text.num_kv_heads, config.text.rope_theta) == (None, 4, 10000.0)
    assert config.vision is not None and config.vision.patch_size == 14
