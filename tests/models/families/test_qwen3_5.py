"""Qwen3.5 against Transformers: the delta rule, logits, configs; and states that follow their requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from saccade import LLM, SamplingParams, costs
from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.models.layers.gated_delta_net import CHUNK, delta_rule
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import family_for
from saccade.runner.recurrent_state import RecurrentStates
from saccade.types.media import Size
from saccade.types.step import ScheduledWindow, StateCheckpoint
from tests.helpers.families.family_qwen3_5 import IMAGE, build
from tests.helpers.families.parity import CPU, Pair, assert_close, hybrid_logits, prompt, their_logits
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

# What the hub says of Qwen3.5-9B, as far as shapes go.
PUBLISHED_9B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "tie_word_embeddings": False,
    "text_config": {
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
    "vision_config": {
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


@pytest.fixture(scope="module", params=["saved", "published"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("qwen3_5"), layout=request.param)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return Pair(folder)


# --- the delta rule -----------------------------------------------------------------------------------------------


def rule_inputs(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, generator=generator)

    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (random(tokens, 8), random(tokens, 8)))
    return {"q": q, "k": k, "v": random(tokens, 5), "g": -random(tokens).abs(), "beta": random(tokens).sigmoid()}


def one_by_one(inputs: dict[str, Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
    """As the formula says it, token by token."""
    read = []
    for t in range(inputs["q"].shape[2]):
        q, k, v = (inputs[name][:, :, t] for name in ("q", "k", "v"))
        memory = memory * inputs["g"][:, :, t].exp()[..., None, None]
        correction = (v - (k[..., None] * memory).sum(-2)) * inputs["beta"][:, :, t, None]
        memory = memory + k[..., None] * correction[..., None, :]
        read.append((q[..., None] * memory).sum(-2))
    return torch.stack(read, dim=2), memory


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 2 * CHUNK + 7), seed=st.integers(0, 5))
def test_chunks_of_the_delta_rule_give_what_single_tokens_give(tokens: int, seed: int) -> None:
    inputs, memory = rule_inputs(tokens, seed), torch.randn(2, 3, 8, 5)
    for found, expected in zip(delta_rule(**inputs, state=memory), one_by_one(inputs, memory), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_delta_rule_is_that_of_transformers() -> None:
    inputs = rule_inputs(70)
    found, memory = delta_rule(**inputs, state=torch.zeros(2, 3, 8, 5))
    turned = {name: x.transpose(1, 2) for name, x in inputs.items()}
    expected, last = torch_recurrent_gated_delta_rule(
        turned["q"], turned["k"], turned["v"], g=turned["g"], beta=turned["beta"], output_final_state=True
    )
    torch.testing.assert_close(found * 8**-0.5, expected.transpose(1, 2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(memory, last, atol=1e-4, rtol=1e-4)


# --- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1000, 19, 1], ids=["whole", "in chunks", "token by token"])
def test_logits_equal_transformers(pair: Pair, count: int, chunk: int) -> None:
    images = pair.images(count)
    ids = prompt(pair, images)
    assert_close(hybrid_logits(pair, ids, images, chunk), their_logits(pair, ids, images))


# --- what configs say ---------------------------------------------------------------------------------------------


def test_the_published_shape_keeps_keys_and_values_in_every_fourth_layer() -> None:
    text = model_config(PUBLISHED_9B).text
    assert text.linear is not None and text.linear.layers[:4] == (0, 1, 2, 4) and len(text.linear.layers) == 24
    assert text.num_kv_layers == 8 and costs.kv_bytes_per_token(text, "bfloat16") == 8 * 2 * 4 * 256 * 2
    assert costs.state_bytes_per_request(text, "bfloat16") == 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


def test_a_image_costs_a_token_for_32_by_32_pixels(folder: Path) -> None:
    files = open_checkpoint(str(folder), weights=False)
    geometry = family_for(files.config).from_checkpoint(files).geometry(Size(640, 480), 65536, 16777216)
    assert geometry.tokens == 20 * 15


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_value_heads": None}, "linear_attention layers"),
        ({"linear_num_key_heads": 3}, "4 value heads of linear attention cannot share 3 key heads"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_its_values(folder: Path, changes: dict[str, Any], said: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"].update(changes)
    with pytest.raises(ConfigError, match=said):
        load_model(None, model_config(raw), dtype=torch.float32, device=CPU, load_format="dummy")


# --- rows of states -----------------------------------------------------------------------------------------------


def make_states(rows: int = 2, kept: int = 0) -> RecurrentStates:
    linear = model_config(PUBLISHED_9B).text.linear
    assert linear is not None
    small = {"key_heads": 1, "value_heads": 1, "key_dim": 2, "value_dim": 2, "layers": (0,)}
    return RecurrentStates(type(linear)(kernel=4, **small), rows, kept, torch.float32, CPU)  # type: ignore[arg-type]


def test_a_row_is_given_back_and_begins_at_zero_again() -> None:
    states = make_states(1)
    states.open("a")
    states.recurrent.fill_(7)
    states.close("a")
    states.open("b")
    assert not states.recurrent[:, 0].any()  # the other row is for padding
    states.check()


def test_a_window_that_does_not_begin_where_its_state_is_breaks_the_step() -> None:
    states = make_states()
    states.open("a")
    states.of([ScheduledWindow("a", 0, 5, (), False)])
    with pytest.raises(AssertionError, match="after 5 tokens cannot go on at 6"):
        states.of([ScheduledWindow("a", 6, 7, (), True)])


def test_windows_of_one_token_are_computed_together() -> None:
    states = make_states(3)
    for name in "abc":
        states.open(name)
    states.of([ScheduledWindow(name, 0, 4, (), False) for name in "ab"])
    groups = states.of(
        [
            ScheduledWindow("a", 4, 5, (), True),
            ScheduledWindow("c", 0, 3, (), False),
            ScheduledWindow("b", 4, 5, (), True),
        ]
    ).groups
    assert sorted(group.tokens.tolist() for group in groups) == [[[0], [4]], [[1, 2, 3]]]


def test_a_window_is_cut_where_its_state_is_kept_and_another_request_goes_on_from_there() -> None:
    states = make_states(2, kept=2)
    states.open("a")
    now = states.of([ScheduledWindow("a", 0, 7, (), False, (StateCheckpoint(4, 1), StateCheckpoint(6, 0)))])
    assert [group.tokens.tolist() for group in now.groups] == [[[0, 1, 2, 3]], [[4, 5]], [[6]]]
    assert [None if g.keep_in is None else g.keep_in.tolist() for g in now.groups] == [[4], [3], None]
    states.recurrent[:, 4] = 5
    states.open("b", StateCheckpoint(4, 1))
    (group,) = states.of([ScheduledWindow("b", 4, 9, (), False)]).groups
    assert (states.recurrent[:, group.rows] == 5).all()


def test_a_question_about_a_image_seen_before_begins_behind_the_image(folder: Path) -> None:
    llm = LLM(model=str(folder), max_model_len=512, kv_cache_gb=0.02, use_tqdm=False)
    image, greedy = make_photo(300, 250), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outs = [
        llm.generate({"prompt": IMAGE + text, "multi_modal_data": {"image": image}}, greedy, use_tqdm=False)[0]
        for text in ("What is in the picture?", "How many red circles are there?")
    ]
    assert [out.num_cached_tokens for out in outs] == [0, 64]  # 72 tokens of a picture behind one of text
    assert llm.stats()["encoder"]["encoded"] == 1
    llm.engine.core.runner.forward.recurrent.check()
    llm.close()
