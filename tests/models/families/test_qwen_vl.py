"""The first Qwen-VL, and Qwen without a tower: against a reference of our own, and its decoder against Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from saccade import LLM
from saccade.checkpoint.config import ModelConfig, model_config
from saccade.cli.count import count_files
from saccade.errors import ConfigError, RequestError
from saccade.models.families.qwen_vl import QwenVL as Model
from saccade.models.interface import ModelParts
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import TorchVision
from saccade.models.weights import _plan, _stored_targets
from saccade.options.engine import Options
from saccade.processor.families import family_for
from saccade.processor.families.qwen_vl import QwenVL
from saccade.processor.families.text import Text
from saccade.processor.input_processor import Processor
from saccade.types.media import Grid, Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_qwen_vl
from tests.helpers.families.family_checks import Given, Subject, as_patches, assert_close, dummy, edited
from tests.helpers.families.family_qwen_vl import SlowTokenizer
from tests.helpers.media.images import make_photo, png

pytestmark = pytest.mark.transformers

PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2), make_photo(31, 33, 3)]
PUBLISHED: dict[str, Any] = {  # what Qwen-VL-Chat says
    "architectures": ["QWenLMHeadModel"],
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 8192,
    "model_type": "qwen",
    "no_bias": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "seq_length": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "visual": {
        "heads": 16,
        "image_size": 448,
        "image_start_id": 151857,
        "layers": 48,
        "mlp_ratio": 4.9231,
        "output_dim": 4096,
        "patch_size": 14,
        "width": 1664,
    },
    "vocab_size": 151936,
}
CHAT = {"chat_format": "chatml", "eos_token_id": 151643}


def published(**changes: Any) -> ModelConfig:
    return model_config({**PUBLISHED, **changes}, CHAT)


class Case(NamedTuple):
    folder: Path
    subject: Subject
    reference: Reference


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = family_qwen_vl.build(tmp_path_factory.mktemp("qwen_vl"))
    return Case(folder, Subject(folder), family_qwen_vl.reference(folder))


# --- what a picture costs -----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(width=st.integers(1, 60_000), height=st.integers(1, 60_000))
def test_any_image_is_256_tokens_of_one_square(width: int, height: int) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    family = QwenVL.from_checkpoint(Given(published()))
    geometry = family.geometry(Size(width, height), *family.policy(None, 100_000))
    assert geometry == family.largest(1, 1)
    assert (geometry.resized, geometry.grid) == (Size(448, 448), Grid(1, 32, 32))
    assert (geometry.tokens, geometry.slots) == (256, 256)
    assert set(family.expand(geometry).token_ids.tolist()) == {151859}


def test_extreme_aspect_ratios_are_refused() -> None:
    with pytest.raises(RequestError, match="201x1"):
        QwenVL.from_checkpoint(Given(published())).geometry(Size(201, 1), 1, 1)


def test_whatever_changes_pixels_changes_the_tag() -> None:
    visual = PUBLISHED["visual"]
    given = [Given(published()), Given(published(visual={**visual, "image_size": 224}))]
    given.append(Given(published(), {"resample": 2}))
    assert len({QwenVL.from_checkpoint(one).policy_tag(1, 1) for one in given}) == 3


def test_images_are_counted_from_the_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    (tmp_path / "a.png").write_bytes(png(make_photo(84, 56)))
    counts, errors = count_files([str(tmp_path / "a.png")], Options(model=str(tmp_path)))
    assert not errors and (counts[0].tokens, counts[0].kv_blocks, counts[0].resized_width) == (256, 16, 448)


# --- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: f"{photo.width}x{photo.height}")
def test_prepared_patches_equal_those_of_the_reference(case: Case, photo: Any) -> None:
    theirs = as_patches(case.reference.read([photo])[0]["pixel_values"], 14)
    torch.testing.assert_close(case.subject.prepare(photo), theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "visual",
    [
        pytest.param({}, id="queries and positions in between"),
        pytest.param({"n_queries": 64}, id="a query for each patch"),
        pytest.param({"width": 256, "layers": 1}, id="a tower as wide as the decoder"),
        pytest.param({"image_size": 224, "layers": 1}, id="a position for each patch"),
    ],
)
def test_embeddings_equal_those_of_the_reference(tmp_path: Path, visual: dict[str, Any]) -> None:
    folder = family_qwen_vl.build(tmp_path, visual=visual)
    reference = family_qwen_vl.reference(folder)
    with torch.inference_mode():
        theirs = reference.model.transformer["visual"](reference.read(PHOTOS)[0]["pixel_values"])
    for ours, other in zip(Subject(folder).embeddings(PHOTOS), theirs, strict=True):
        assert_close(ours, other)


@pytest.mark.parametrize("no_bias", [True, False])
def test_qwen_without_a_tower_gives_the_logits_of_the_reference(tmp_path: Path, no_bias: bool) -> None:
    folder = family_qwen_vl.build(tmp_path, sees=False, no_bias=no_bias)
    text = "The quick brown fox <img> <|im_start|>user"
    assert_close(Subject(folder).logits(text, []), family_qwen_vl.reference(folder).logits(text, []))


def test_the_decoder_gives_the_logits_of_transformers_qwen2_with_the_same_weights(case: Case) -> None:
    theirs = qwen2_of(case.folder)
    text = "The quick brown fox jumps over the lazy dog"
    ids = torch.tensor([SlowTokenizer(case.folder).encode(text)])
    with torch.inference_mode():
        assert_close(case.subject.logits(text, []), theirs(ids).logits[0])


def qwen2_of(folder: Path) -> Any:
    """The same decoder under the names of its successor, whose gate is what w2 makes."""
    config = family_qwen_vl.load_reference(folder).config
    stored = load_file(folder / "model.safetensors")
    names = {
        "ln_1.weight": "input_layernorm.weight",
        "attn.c_proj.weight": "self_attn.o_proj.weight",
        "ln_2.weight": "post_attention_layernorm.weight",
        "mlp.w1.weight": "mlp.up_proj.weight",
        "mlp.w2.weight": "mlp.gate_proj.weight",
        "mlp.c_proj.weight": "mlp.down_proj.weight",
    }
    state = {"model.embed_tokens.weight": stored["transformer.wte.weight"], "lm_head.weight": stored["lm_head.weight"]}
    state["model.norm.weight"] = stored["transformer.ln_f.weight"]
    for i in range(config["num_hidden_layers"]):
        here, there = f"transformer.h.{i}.", f"model.layers.{i}."
        state |= {there + new: stored[here + old] for old, new in names.items()}
        for kind in ("weight", "bias"):
            thirds = stored[f"{here}attn.c_attn.{kind}"].chunk(3)
            state |= {f"{there}self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", thirds, strict=True)}
    same = {name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    heads, wide = config["num_attention_heads"], config["intermediate_size"] // 2
    model = Qwen2ForCausalLM(Qwen2Config(**same, num_key_value_heads=heads, intermediate_size=wide, rms_norm_eps=1e-6))
    model.load_state_dict(state)
    return model.eval()


# --- chats --------------------------------------------------------------------------------------------------------


def ask(processor: Processor, *turns: Any) -> Any:
    roles = ("user", "assistant")
    return processor.from_chat([{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)])


def test_a_chat_is_written_as_the_published_code_writes_it(case: Case) -> None:
    shown = [{"type": "image", "image": PHOTOS[0]}, {"type": "text", "text": "What is it?"}]
    more = [{"type": "image", "image": PHOTOS[1]}, {"type": "image", "image": PHOTOS[2]}, "And <ref>this</ref>?"]
    prompt = ask(case.subject.processor, shown, "A dog.", more)
    assert prompt.text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nPicture 1: <img><imgpad></img>\nWhat is it?<|im_end|>\n"
        "<|im_start|>assistant\nA dog.<|im_end|>\n"
        "<|im_start|>user\nPicture 2: <img><imgpad></img>\nPicture 3: <img><imgpad></img>\n"
        "And <ref>this</ref>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    expanded = prompt.text.replace("<imgpad>", "<imgpad>" * 16)
    assert prompt.token_ids == SlowTokenizer(case.folder).encode(expanded)


def test_a_system_message_takes_the_place_of_the_usual_one(case: Case) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = case.subject.processor.from_chat(messages).text
    assert text is not None and text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<")


def test_a_client_cannot_write_a_image(case: Case) -> None:
    ids = ask(case.subject.processor, "<img><imgpad></img>").token_ids
    start = len(family_qwen_vl.train_ranks()) + 214
    assert not {start, start + 1, start + 2} & set(ids)


def test_a_checkpoint_that_was_not_trained_to_chat_has_no_template(tmp_path: Path) -> None:
    folder = family_qwen_vl.build(tmp_path)
    (folder / "generation_config.json").write_text('{"chat_format": "raw", "eos_token_id": 436}')
    subject = Subject(folder)
    assert subject.config.eos_token_ids == {436}
    with pytest.raises(ConfigError, match="no chat template"):
        ask(subject.processor, "Hello")


def test_chats_end_at_the_end_of_a_turn_too() -> None:
    assert published().eos_token_ids == {151643, 151644, 151645}


def test_a_model_without_a_tower_refuses_images(tmp_path: Path) -> None:
    processor = Subject(family_qwen_vl.build(tmp_path, sees=False)).processor
    assert ask(processor, "Hello").text.endswith("<|im_start|>assistant\n")
    with pytest.raises(RequestError, match="reads text only"):
        ask(processor, [{"type": "image", "image": PHOTOS[0]}])


# --- what checkpoints say -----------------------------------------------------------------------------------------


def test_a_tower_makes_another_family_of_it() -> None:
    assert family_for(published()) is QwenVL
    assert family_for(published(visual=None)) is Text


def test_the_context_ends_where_frequencies_would_begin_to_change() -> None:
    assert published().text.max_context == 2048
    assert published(use_dynamic_ntk=False).text.max_context == 2048
    assert published(use_dynamic_ntk=False, use_logn_attn=False).text.max_context == 8192


def test_a_config_that_was_read_is_read_again_as_it_is() -> None:
    """On its way to the engine's process."""
    config = published()
    ends = {"eos_token_id": sorted(config.eos_token_ids)}
    assert model_config(json.loads(json.dumps(config.raw)), ends) == config


def test_a_longer_context_is_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match="max_model_len=4096 is beyond the 2048 positions"):
        LLM(str(case.folder), max_model_len=4096, kv_cache_gb=0.1, use_tqdm=False)


def test_the_published_tensors_fill_the_published_shape() -> None:
    """Names and shapes of Qwen-VL-Chat's 853 tensors."""
    params = Parameters(torch.bfloat16, torch.device("meta"))
    model = Model(ModelParts(published(), params, {}, TorchVision()))
    names = tensors()
    assert len(names) == 853
    targets = _stored_targets(names, params.targets, model.rules(), params.wholes)
    plan = _plan(SimpleNamespace(file_of=names), targets, model.rules())
    assert len(plan) == 853
    assert all(targets[ours].numel() == int(np.prod(names[theirs])) for theirs, ours in plan.items())


def tensors() -> dict[str, tuple[int, ...]]:
    layer = {"attn.c_attn.bias": (12288,), "attn.c_attn.weight": (12288, 4096), "attn.c_proj.weight": (4096, 4096)}
    layer |= {"ln_1.weight": (4096,), "ln_2.weight": (4096,), "mlp.c_proj.weight": (4096, 11008)}
    layer |= {"mlp.w1.weight": (11008, 4096), "mlp.w2.weight": (11008, 4096)}
    block = {f"ln_{i}.{kind}": (1664,) for i in (1, 2) for kind in ("weight", "bias")}
    for name, (rows, columns) in {
        "attn.in_proj": (4992, 1664),
        "attn.out_proj": (1664, 1664),
        "mlp.c_fc": (8192, 1664),
        "mlp.c_proj": (1664, 8192),
    }.items():
        block |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    pool = {"query": (256, 4096), "pos_embed": (256, 4096), "kv_proj.weight": (4096, 1664)}
    pool |= {"attn.in_proj_weight": (12288, 4096), "attn.in_proj_bias": (12288,)}
    pool |= {"attn.out_proj.weight": (4096, 4096), "attn.out_proj.bias": (4096,)}
    pool |= {f"{name}.{kind}": (4096,) for name in ("ln_q", "ln_kv") for kind in ("weight", "bias")}
    visual = {"conv1.weight": (1664, 3, 14, 14), "positional_embedding": (256, 1664), "proj": (4096, 4096)}
    visual |= {f"ln_pre.{kind}": (1664,) for kind in ("weight", "bias")}
    visual |= {f"ln_post.{kind}": (4096,) for kind in ("weight", "bias")}
    visual |= {f"attn_pool.{name}": shape for name, shape in pool.items()}
    visual |= {f"transformer.resblocks.{i}.{name}": shape for i in range(48) for name, shape in block.items()}
    below = {"wte.weight": (151936, 4096), "ln_f.weight": (4096,)}
    below |= {f"h.{i}.{name}": shape for i in range(32) for name, shape in layer.items()}
    below |= {f"visual.{name}": shape for name, shape in visual.items()}
    return {"lm_head.weight": (151936, 4096), **{f"transformer.{name}": shape for name, shape in below.items()}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rotary_pct": 0.5}, "rotary_pct=0.5 is not supported"),
        ({"kv_channels": 32}, "4 heads of kv_channels=32 do not add up to hidden_size=256"),
        ({"visual": {"output_dim": 128}}, "output_dim=128 is not the decoder's width 256"),
        ({"hidden_size": 192, "kv_channels": 48, "visual": {"output_dim": 192}}, "width 192 does not divide"),
    ],
    ids=str,
)
def test_shapes_that_cannot_work_are_refused(case: Case, changes: dict[str, Any], said: str) -> None:
    raw = json.loads((case.folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=said):
        dummy(raw, **changes)


@pytest.mark.parametrize(
    ("visual", "said"),
    [
        ({"n_queries": 20}, "n_queries=20 must be a square"),
        ({"n_queries": 0}, "visual.n_queries is 0, but a whole number"),
        ({"image_size": 450}, "a side of 450 is not cut into patches of 14"),
        ({"image_start_id": None}, "visual needs image_size and image_start_id"),
    ],
    ids=str,
)
def test_towers_that_cannot_work_are_refused(visual: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QwenVL.from_checkpoint(Given(published(visual={**PUBLISHED["visual"], **visual})))


def test_a_missing_projection_is_named(tmp_path: Path) -> None:
    folder = family_qwen_vl.build(tmp_path)
    stored = load_file(folder / "model.safetensors")
    del stored["transformer.h.1.attn.c_attn.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 3 tensors .*layers\.1\.qkv\.k\.weight"):
        Subject(folder)


def test_a_bias_of_another_length_is_named(tmp_path: Path) -> None:
    folder = family_qwen_vl.build(tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["transformer.h.1.attn.c_attn.bias"] = torch.zeros(760)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"c_attn\.bias .* has the shape \[760\], but config.json asks for \[768\]"):
        Subject(folder)


def test_a_projection_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = edited(family_qwen_vl.build(tmp_path), lambda raw: raw["visual"].update(heads=6, width=36))
    with pytest.raises(ConfigError, match=r"has the shape \[.*48.*\], but config.json asks for \[.*36"):
        Subject(folder)
