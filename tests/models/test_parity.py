"""Both model families against Transformers on small random checkpoints, in both layouts a checkpoint can have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from benchmarks import checkpoints
from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.models.interface import VisionLanguageModel
from saccade.models.layers.torch_attention import PagedAttention, PagedKV
from saccade.types.media import Grid
from tests.helpers.families.parity import (
    BLOCK,
    CPU,
    Pair,
    assert_close,
    finish,
    one_request,
    our_logits,
    pixel_arguments,
    positions_of,
    prompt,
    their_logits,
)

pytestmark = pytest.mark.transformers

FAMILIES: dict[str, Callable[..., Path]] = {"qwen2_vl": checkpoints.qwen2_vl, "llava": checkpoints.llava}


@pytest.fixture(
    scope="module", params=[(f, layout) for f in FAMILIES for layout in ("saved", "published")], ids="-".join
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, layout = request.param
    return Pair(FAMILIES[family](tmp_path_factory.mktemp(family), layout=layout))


def test_encoding_pauses_after_every_layer(pair: Pair) -> None:
    (grid, patches), *_ = pair.images(1)
    vision = pair.config.vision
    assert vision is not None
    needed = vision.num_layers - 1 if pair.config.model_type == "llava" else vision.num_layers
    with torch.inference_mode():
        assert len(list(pair.ours.encode(patches, [grid]))) == needed


def test_a_forward_pass_leaves_the_callers_embeddings_alone(pair: Pair) -> None:
    ids = prompt(pair, [])
    with torch.inference_mode():
        embeds = pair.ours.embed(ids)
        before = embeds.clone()
        kv = PagedKV.allocate(pair.config.text, 64, BLOCK, torch.float32, CPU)
        attention = PagedAttention(kv, one_request(len(ids), len(ids)), 0.25)
        pair.ours.forward(embeds, positions_of(pair, ids, []), attention)
    assert torch.equal(embeds, before)


def test_a_clip_of_several_frames_encodes_as_in_transformers(tmp_path: Path) -> None:
    pair = Pair(checkpoints.qwen2_vl(tmp_path))
    grid = Grid(2, 4, 6)
    patches = torch.randn(grid.patches, 3 * 2 * 14 * 14)
    with torch.inference_mode():
        ours = finish(pair.ours.encode(patches, [grid]))[0]
        theirs = pair.theirs.get_image_features(patches, torch.tensor([grid])).pooler_output[0]
    assert_close(ours, theirs)


# --- variants of the decoder and the towers -----------------------------------------------------------------------


def _edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    "text",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 24},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["biases", "own head size", "one key head", "linear rope", "llama3 rope"],
)
def test_llama_decoders_of_every_kind_match(tmp_path: Path, text: dict[str, Any]) -> None:
    pair = Pair(checkpoints.llava(tmp_path, text=text))
    images = pair.images(1)
    ids = prompt(pair, images)
    assert_close(our_logits(pair, ids, images), their_logits(pair, ids, images))


def test_an_untied_head_of_qwen2_vl_matches(tmp_path: Path) -> None:
    pair = Pair(checkpoints.qwen2_vl(tmp_path, text={"tie_word_embeddings": False}))
    ids = prompt(pair, [])
    assert_close(our_logits(pair, ids, []), their_logits(pair, ids, []))


@pytest.mark.parametrize(
    "changes",
    [
        {"vision_feature_layer": -1},
        {"vision_feature_layer": 1},
        {"vision_feature_select_strategy": "full"},
        {"projector_hidden_act": "relu"},
    ],
    ids=str,
)
def test_llava_features_are_taken_where_the_config_says(tmp_path: Path, changes: dict[str, Any]) -> None:
    pair = Pair(_edit_config(checkpoints.llava(tmp_path), lambda raw: raw.update(changes)))
    images = pair.images(2)
    with torch.inference_mode():
        ours = finish(pair.ours.encode(torch.cat([p for _, p in images]), [g for g, _ in images]))
        theirs = pair.theirs.get_image_features(**pixel_arguments(pair, images)).pooler_output
    assert_close(torch.cat(ours), torch.cat(list(theirs)))


def test_features_of_several_layers_are_joined(tmp_path: Path) -> None:
    text = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, image_size=56, patch_size=14
    )
    config = LlavaConfig(text_config=text, vision_config=vision, vision_feature_layer=[-3, 1], image_token_index=98)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    pair = Pair(tmp_path)
    images = pair.images(1)
    with torch.inference_mode():
        ours = finish(pair.ours.encode(images[0][1], [images[0][0]]))
        theirs = pair.theirs.get_image_features(**pixel_arguments(pair, images)).pooler_output
    assert_close(ours[0], theirs[0])


def test_a_clip_tower_with_gelu_matches(tmp_path: Path) -> None:
    pair = Pair(checkpoints.llava(tmp_path, vision={"hidden_act": "gelu"}))
    images = pair.images(1)
    ids = prompt(pair, images)
    assert_close(our_logits(pair, ids, images), their_logits(pair, ids, images))


# --- what cannot be built -----------------------------------------------------------------------------------------


def build(raw: dict[str, Any]) -> VisionLanguageModel:
    return load_model(None, model_config(raw), dtype=torch.float32, device=CPU, load_format="dummy")


def _edited(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**raw, **{k: {**raw[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}}


@pytest.fixture(scope="module")
def llava_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = checkpoints.llava(tmp_path_factory.mktemp("config"))
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "blip"}, "'blip'.*known are .*llava.*qwen2_vl"),
        ({"vision_feature_layer": -9}, "vision_feature_layer -9.*4 layers"),
        ({"vision_feature_select_strategy": "some"}, "default or full, not 'some'"),
        ({"projector_hidden_act": "mish"}, "'mish'.*known are"),
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, "'dynamic'.*known are"),
        ({"text_config": {"model_type": "gemma"}}, "'gemma'.*known are llama, mistral and qwen2"),
        ({"text_config": {"num_key_value_heads": 3}}, "4 attention heads cannot share 3"),
        ({"vision_config": {"num_attention_heads": 5}}, "width 48 does not divide into 5"),
        ({"vision_config": {"image_size": None}}, "image_size"),
        ({"vision_config": None}, "needs a vision_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_work_is_refused_with_its_values(
    llava_config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build(_edited(llava_config, **changes))


def test_without_a_folder_only_dummy_weights_can_be_had(llava_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'auto' needs a folder.*'dummy'"):
        load_model(None, model_config(llava_config), dtype=torch.float32, device=CPU)
