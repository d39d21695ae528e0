"""DeepSeek-VL2: what a picture costs, how it is cut, what tower, projector and decoder make of it, and its chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers import SiglipVisionConfig, SiglipVisionModel

from saccade import LLM, SamplingParams, costs, vision_graph_sizes
from saccade.checkpoint.config import model_config
from saccade.cli.count import count_files
from saccade.models.families.deepseek_vl_v2 import Projector
from saccade.models.layers.mla import LatentDecoder
from saccade.models.layers.torch_attention import PagedKV
from saccade.models.state_dict import Parameters
from saccade.models.weights import fill_random
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families.deepseek_vl_v2 import DeepseekVL2
from saccade.runner.encoder.graph_capture import _packings
from saccade.runner.latency_profile import largest_within
from saccade.types.media import Grid, Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_deepseek_vl_v2 as family
from tests.helpers.families import reference_deepseek_vl_v2 as slow
from tests.helpers.families.family_checks import Given, Subject, as_patches, assert_close, edited, finish
from tests.helpers.families.family_deepseek_vl_v2 import PUBLISHED, TINY
from tests.helpers.kernels.allocations import PeakMemory
from tests.helpers.media.images import make_photo, png

pytestmark = pytest.mark.transformers

PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2), make_photo(31, 33, 3), make_photo(300, 70, 4)]
sides = st.one_of(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 60_000))


@pytest.fixture(scope="module", params=["tiny", "base", "grouped"])
def size(request: pytest.FixtureRequest) -> str:
    """Kinds of decoders beside the one that all families' tests run."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.build(tmp_path_factory.mktemp("deepseek_vl_v2"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family.reference(folder)


@pytest.fixture(scope="module")
def published() -> DeepseekVL2:
    """The rules of the checkpoints on the hub."""
    return DeepseekVL2.from_checkpoint(Given(model_config(TINY)))


def tiles_of(family: DeepseekVL2, size: Size, limits: tuple[int, int]) -> tuple[int, int]:
    tiling = family.geometry(size, *limits).tiling
    assert tiling is not None
    return tiling.columns, tiling.rows


# --- what a picture costs -----------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(width=sides, height=sides)
@example(width=384, height=384)
@example(width=3456, height=384)
def test_any_image_has_the_tiles_and_tokens_of_the_published_rule(
    published: DeepseekVL2, width: int, height: int
) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    geometry = published.geometry(Size(width, height), *published.policy(None, None))
    canvas = slow.canvas_of((width, height), PUBLISHED)
    assert geometry.tokens == geometry.slots == slow.tokens_of(canvas, 384, 14, 2)
    assert geometry.grid == Grid(1 + canvas[0] * canvas[1] // 384**2, 27, 27)


@settings(max_examples=100, deadline=None)
@given(width=st.integers(1, 500), height=st.integers(1, 500), columns=st.integers(1, 9), rows=st.integers(1, 9))
def test_a_image_fits_its_canvas_as_pillow_fits_it(width: int, height: int, columns: int, rows: int) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    canvas = Size(384 * columns, 384 * rows)
    assert Size(width, height).inside(canvas) == ImageOps.contain(Image.new("L", (width, height)), canvas).size


@pytest.mark.parametrize(
    ("size", "tiles", "tokens"),
    [
        (Size(384, 384), (1, 1), 14 * 15 + 1 + 14 * 15),
        (Size(640, 480), (2, 2), 1023),
        (Size(1920, 1080), (4, 2), 1807),
        (Size(3000, 3000), (3, 3), 2017),
        (Size(300, 4000), (1, 9), 2101),
    ],
)
def test_worked_examples(published: DeepseekVL2, size: Size, tiles: tuple[int, int], tokens: int) -> None:
    limits = published.policy(None, None)
    assert tiles_of(published, size, limits) == tiles
    assert published.geometry(size, *limits).tokens == tokens


def test_a_lower_limit_leaves_out_the_larger_canvases(published: DeepseekVL2) -> None:
    limits = published.policy(None, 2 * 384**2)
    assert tiles_of(published, Size(1500, 3000), limits) == (1, 2)
    assert tiles_of(published, Size(3000, 3000), published.policy(None, 1)) == (1, 1)
    assert published.policy_tag(*limits) != published.policy_tag(*published.policy(None, None))


# --- many pictures ------------------------------------------------------------------------------------------------


def test_three_images_get_a_tile_each_and_two_keep_theirs(subject: Subject) -> None:
    def lengths(count: int) -> list[int]:
        asked = {"prompt": "<image>" * count, "multi_modal_data": {"image": PHOTOS[:count]}}
        return [span.length for span in subject.processor.from_prompt(asked).spans]

    alone = [subject.geometry(photo).tokens for photo in PHOTOS[:2]]
    assert lengths(2) == alone and min(alone) > 13
    assert lengths(3) == [13] * 3


@pytest.mark.parametrize("count", [2, 3])
def test_counting_files_of_one_prompt_gives_what_the_prompt_is_billed(
    subject: Subject, folder: Path, tmp_path: Path, count: int
) -> None:
    for i, photo in enumerate(PHOTOS[:count]):
        (tmp_path / f"{i}.png").write_bytes(png(photo))
    files = [str(tmp_path / f"{i}.png") for i in range(count)]
    asked = {"prompt": "<image>\n" * count, "multi_modal_data": {"image": PHOTOS[:count]}}
    billed = subject.processor.bill(subject.processor.from_prompt(asked), 16).items
    rows, _ = count_files(files, Options(model=str(folder)), together=True)
    assert [row.tokens for row in rows] == [item.tokens for item in billed]
    alone, _ = count_files(files, Options(model=str(folder)))
    assert (alone == rows) is (count == 2)


def test_the_same_image_has_another_key_where_it_is_seen_smaller(subject: Subject) -> None:
    keys = []
    for count in (1, 3):
        asked = {"prompt": "<image>" * count, "multi_modal_data": {"image": [PHOTOS[0]] * count}}
        keys.append(subject.processor.from_prompt(asked).spans[0].key)
    assert keys[0] != keys[1]


def test_three_images_are_answered_as_the_reference_does(folder: Path, reference: Reference) -> None:
    text = "One <image>\ntwo <image>\nthree <image>\nCompare them."
    llm = LLM(model=str(folder), max_model_len=512, kv_cache_gb=0.02, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    out = llm.generate({"prompt": text, "multi_modal_data": {"image": PHOTOS[:3]}}, params, use_tqdm=False)[0]
    llm.close()
    assert out.prompt_token_ids == reference.inputs(text, PHOTOS[:3])["input_ids"][0].tolist()
    assert out.outputs[0].token_ids == reference.greedy(text, PHOTOS[:3], 12)


# --- what is computed ---------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_prepared_tiles_equal_those_that_pillow_pads(
    subject: Subject, reference: Reference, width: int, height: int
) -> None:
    assume(max(width, height) / min(width, height) <= 50)  # a tile of these tests has no row for thinner ones
    photo = make_photo(width, height)
    made, spelled = reference.read([photo])
    assert len(spelled[0]) == subject.geometry(photo).tokens * len("<image>")
    torch.testing.assert_close(subject.prepare(photo), as_patches(made["views"][0], 14), rtol=0, atol=2e-6)


def test_the_tower_equals_transformers_siglip(subject: Subject, reference: Reference) -> None:
    """Its weights under other names; both the engine's tower and the reference's are held to it."""
    theirs = _siglip(reference.model)
    views = torch.randn(3, 3, family.TILE, family.TILE, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(views).last_hidden_state
        tower, ops = subject.model.tower, subject.model.ops
        assert_close(torch.stack(finish(tower.encode(as_patches(views, 14), 3, ops))), expected)
        assert_close(reference.model.tower(views), expected)


def _siglip(model: Any) -> SiglipVisionModel:
    vision = model.raw["vision_config"]
    made = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=vision["width"], intermediate_size=int(vision["width"] * vision["mlp_ratio"]),
            num_hidden_layers=vision["layers"], num_attention_heads=vision["heads"], image_size=family.TILE,
            patch_size=family.PATCH, vision_use_head=False,
        )
    ).eval()  # fmt: skip
    names = {
        "patch_embed.proj": "embeddings.patch_embedding", "norm": "post_layernorm",
        "norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj",
        "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    }  # fmt: skip
    found = {"embeddings.position_embedding.weight": model.w["vision.pos_embed"][0]}
    for part in ("weight", "bias"):
        for ours in ("patch_embed.proj", "norm"):
            found[f"{names[ours]}.{part}"] = model.w[f"vision.{ours}.{part}"]
        for i in range(vision["layers"]):
            for ours in ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2"):
                found[f"encoder.layers.{i}.{names[ours]}.{part}"] = model.w[f"vision.blocks.{i}.{ours}.{part}"]
            three = model.w[f"vision.blocks.{i}.attn.qkv.{part}"].chunk(3)
            for letter, tensor in zip("qkv", three, strict=True):
                found[f"encoder.layers.{i}.self_attn.{letter}_proj.{part}"] = tensor
    prefix = "vision_model." if any(n.startswith("vision_model.") for n in made.state_dict()) else ""
    made.load_state_dict({prefix + name: tensor for name, tensor in found.items()})
    return made


def test_logits_of_the_other_decoders_equal_those_of_the_reference(
    size: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = family.build(tmp_path_factory.mktemp(size), size=size)
    text = "Look: <image>\n and <image>\n, what are they?"
    assert_close(Subject(made).logits(text, PHOTOS[:2]), family.reference(made).logits(text, PHOTOS[:2]))


def test_chunks_and_caches_change_no_token_with_plain_heads_and_corrected_scores(
    size: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = family.build(tmp_path_factory.mktemp(size), size=size)
    text, params = "Look: <image>\n and <image>\n?", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = family.reference(made).greedy(text, PHOTOS[:2], 12)
    llm = LLM(model=str(made), max_model_len=512, max_num_batched_tokens=24, kv_cache_gb=0.02, use_tqdm=False)
    for _ in range(2):
        out = llm.generate({"prompt": text, "multi_modal_data": {"image": PHOTOS[:2]}}, params, use_tqdm=False)[0]
        assert out.outputs[0].token_ids == expected
    assert out.num_cached_tokens > 0
    llm.close()


@pytest.mark.parametrize(
    "change",
    [
        {"global_view_pos": "tail"},
        {"language_config": {"first_k_dense_replace": 0}},
        {"language_config": {"rope_theta": 500.0}},
        {"language_config": {"num_experts_per_tok": 1}},
    ],
    ids=str,
)
def test_what_configs_vary_is_followed(tmp_path: Path, change: dict[str, Any]) -> None:
    language = change.get("language_config", {})
    made = family.build(tmp_path, **language)
    if not language:
        edited(made, lambda raw: raw.update(change))
    text = "<image>\nwhat is it?"
    assert_close(Subject(made).logits(text, PHOTOS[:1]), family.reference(made).logits(text, PHOTOS[:1]))


def test_other_pixel_settings_are_followed(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    mean, std = [0.25, 0.5, 0.75], [0.5, 0.25, 1.0]
    changed = {**family.PROCESSOR, "image_mean": mean, "image_std": std}
    (tmp_path / "processor_config.json").write_text(json.dumps(changed))
    photo = make_photo(40, 20)
    whole = ImageOps.pad(photo, (44, 44), color=(63, 127, 191))
    values = (torch.from_numpy(np.array(whole)).permute(2, 0, 1)[None] / 255 - _channels(mean)) / _channels(std)
    torch.testing.assert_close(Subject(tmp_path).prepare(photo)[:9], as_patches(values, 14), rtol=0, atol=2e-6)


def _channels(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).view(3, 1, 1)


# --- what is kept -------------------------------------------------------------------------------------------------


def test_one_vector_a_token_is_kept_and_the_formula_says_its_size(subject: Subject) -> None:
    text = subject.config.text
    kv = PagedKV.allocate(text, 3, 16, torch.float32, torch.device("cpu"))
    assert kv.k is kv.v and kv.k.shape == (3, 48, 1, 32 + 16)
    assert kv.k.nbytes == 48 * costs.kv_bytes_per_token(text, "float32")


def test_the_weights_of_a_latent_decoder_are_counted_to_the_last_matrix(size: str, tmp_path: Path) -> None:
    made = family.build(tmp_path, size=size)
    weights = slow.SlowModel(made).w
    matrices = sum(t.numel() for name, t in weights.items() if name.startswith("language.") and t.dim() > 1)
    assert costs.decoder_params(open_checkpoint(str(made)).config.text) == matrices


def test_a_step_with_many_heads_takes_no_more_memory_than_is_planned_for_it() -> None:
    """Shaped as DeepSeek-V2: queries of all heads are far wider than the stream and the MLP."""
    sizes = {"hidden_size": 160, "intermediate_size": 384, "num_attention_heads": 32, "num_hidden_layers": 2}
    ranks = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    text = model_config({"model_type": "deepseek_v2", "vocab_size": 64, **sizes, **ranks}).text
    assert text.mla is not None
    params = Parameters(torch.float32, torch.device("cpu"))
    decoder = LatentDecoder(params, text, text.mla)
    fill_random(params.targets, 0)
    rows = torch.ones(64, text.hidden_size)
    with PeakMemory() as memory, torch.inference_mode():
        decoder.forward(rows, torch.arange(64)[None], lambda layer, q, k, v: torch.empty_like(q))
    planned = len(rows) * costs.prompt_bytes_per_token(text, "float32") - rows.nbytes
    assert planned / 2 < memory.peak <= planned


@pytest.mark.parametrize("given", [{}, {"depth": 3, "mlp_ratio": 2}], ids=str)
def test_the_weights_of_the_projector_are_counted_to_the_last_matrix(given: dict[str, int]) -> None:
    config = model_config({**TINY, "projector_config": {**TINY["projector_config"], **given}})
    assert config.vision is not None
    made = Projector(Parameters(torch.float32, torch.device("meta")), config.raw["projector_config"], config)
    matrices = sum(layer.weight.numel() for layer in made.layers)
    assert costs.projector_params(config.vision, config.text) == matrices


def test_a_layer_is_timed_over_whole_tiles() -> None:
    assert largest_within(model_config(TINY), Grid(10, 27, 27), 2048) == Grid(2, 27, 27)


def test_a_recorded_pass_holds_whole_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_graph_sizes, "MAXIMUM", 2048)
    vision = model_config(TINY).vision
    assert vision
    packings = list(_packings(vision))
    assert packings == [[Grid(1, 27, 27)] * 2, [Grid(1, 27, 27)]]
