"""Models of Transformers whose decoder is one of our kinds: they get ours, and compute what they did."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade import LLM, SamplingParams
from saccade.models import load_model
from saccade.models.bridge import own_decoder, own_modules
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.own_rotation import Rotation, rotations_of
from saccade.models.bridge.text_model import TextModel
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.moe import MoE
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV
from saccade.models.state_dict import Parameters
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.runner import weight_packing
from tests.helpers.engine.async_engine import OPTIONS, overlapped
from tests.helpers.families.bridged import transformers_layers
from tests.helpers.families.packing import needs_onednn
from tests.helpers.families.zoo import ZOO
from tests.helpers.families.zoo.first_half_makers import Recipe, build
from tests.helpers.families.zoo.first_half_tiles import INTERNVL_GPT_OSS
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

CPU = torch.device("cpu")
TOKENS = 40
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def internvl(model_type: str, *, is_tied: bool = False, **text: Any) -> Callable[[Path], Path]:
    """Its tower over a decoder of this kind."""
    more = {**INTERNVL_GPT_OSS.more, "tie_word_embeddings": is_tied}
    fields = {"model_type": model_type, "head_dim": 16, "tie_word_embeddings": is_tied, **text}
    made: Recipe = INTERNVL_GPT_OSS._replace(text=fields, more=more)
    return lambda folder: build(made, folder)


HALF = internvl("glm", attention_bias=True, rope_parameters={**ROPE, "partial_rotary_factor": 0.5})
KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": ZOO["idefics3"].build,
    "llama with all biases": internvl("llama", attention_bias=True, mlp_bias=True),
    "biases, sections on three axes": ZOO["qwen2_5_omni_thinker"].build,
    "norms of heads": ZOO["lighton_ocr"].build,
    "norms of heads, interleaved axes, deep features": ZOO["cosmos3_omni"].build,
    "neighbours rotated": internvl("ernie4_5"),
    "half a head rotated, neighbours, fused gate and up": HALF,
    "yarn, tied": internvl(
        "qwen3",
        is_tied=True,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "norms of what is added": ZOO["glm_ocr"].build,
    "the same, sections on three axes": ZOO["glm4v"].build,
    "windows, two RoPEs, pictures in both directions, scaled embeddings, GELU": ZOO["gemma3"].build,
    "heads that differ, values normed and shared with keys, a soft cap": ZOO["gemma4"].build,
    "experts beside an MLP": ZOO["gemma4@moe"].build,
    "fused queries, keys and values": internvl("phi3", pad_token_id=0),
    "scaled embeddings, sums and logits": ZOO["llava_next@granite"].build,
    "the same with deep features": ZOO["granite_docling"].build,
    "experts": ZOO["qwen3_omni_moe_thinker"].build,
    "experts by sigmoid, in groups, with a bias and a shared one": ZOO["glm4v_moe"].build,
    "experts after a dense layer": ZOO["deepseek_ocr2"].build,
    "delta nets, gates after attention": ZOO["minicpmv4_7"].build,
    "short convolutions": ZOO["lfm2_vl"].build,
    "transposed experts": ZOO["aria"].build,
    "prompts in both directions, scaled embeddings, GELU": ZOO["paligemma"].build,
}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> ModelBridge:
    config = open_checkpoint(str(folder)).config
    model = load_model(folder, config, dtype=dtype, device=CPU, max_model_len=512)
    assert isinstance(model, ModelBridge)
    return model


def theirs(folder: Path) -> ModelBridge:
    with transformers_layers():
        return loaded(folder)


@torch.inference_mode()
def logits(model: ModelBridge) -> Tensor:
    """Of text at positions that differ by axis."""
    kv = PagedKV.allocate(model.config.text, 3, 16, model.dtype, CPU)
    batch = AttentionBatch([TOKENS], [TOKENS], torch.tensor([[0, 1, 2]]), torch.arange(TOKENS), 16)
    attention = PagedAttention(kv, batch, model.decoder.scale)
    positions = torch.stack([torch.arange(TOKENS) * (axis + 1) for axis in range(model.axes)])
    ids = torch.arange(TOKENS) + 5
    linear = model.config.text.linear
    states = None
    if linear is not None:
        group = WindowGroup(torch.arange(TOKENS)[None], torch.tensor([0]))
        states = States.zeros(linear, 1, model.dtype, CPU)._replace(groups=[group])
    return model.logits(model.forward(model.embed(ids), positions, attention, states))


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_of_our_kinds_is_ours_and_computes_the_same(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    expected = theirs(folder)
    model = loaded(folder)
    assert isinstance(model.decoder, Decoder) and isinstance(expected.decoder, TextModel)
    torch.testing.assert_close(logits(model), logits(expected), atol=1e-3, rtol=1e-3)


def test_in_bfloat16_it_is_found_as_well(tmp_path: Path) -> None:
    assert isinstance(loaded(HALF(tmp_path), torch.bfloat16).decoder, Decoder)


@pytest.mark.parametrize(
    ("family", "axes"),
    [("qwen2_5_omni_thinker", [0] * 2 + [1] * 3 + [2] * 3), ("cosmos3_omni", [0, 1, 2, 0, 1, 2, 0, 0])],
)
def test_axes_of_frequencies_are_found_by_numbers(family: str, axes: list[int], tmp_path: Path) -> None:
    model = theirs(ZOO[family].build(tmp_path))
    rotation = rotations_of(model)[0]
    assert rotation.axes.tolist() == axes and rotation.order.tolist() == list(range(16))


def test_what_is_not_rotated_has_no_frequency(tmp_path: Path) -> None:
    rotation = rotations_of(theirs(HALF(tmp_path)))[0]
    assert rotation.order.tolist() == [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    assert rotation.frequencies[4:].tolist() == [0.0] * 4 and not rotation.is_ordered


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (ZOO["granite4_vision"].build, "with our layers its logits differ by"),
        (internvl("llama", hidden_act="gelu"), "its MLPs activate by GELUActivation, ours by SiLU or by GELU's tanh"),
        (ZOO["hunyuan_vl"].build, "its layers have self_attn.query_layernorm.weight, which ours have not"),
        (
            internvl("lfm2", conv_bias=True, layer_types=["conv", "full_attention"]),
            "its layers have conv.conv.bias, which ours have not",
        ),
        (ZOO["gemma4@e2b"].build, "its decoder takes more than embeddings and deep features"),
        (
            ZOO["aya_vision"].build,
            "its layers have no pre_feedforward_layernorm or post_attention_layernorm or ffn_norm",
        ),
        (internvl("smollm3", no_rope_layers=[1, 0]), "its queries and keys are not rotated as ours are"),
    ],
)
def test_what_ours_cannot_compute_stays_with_its_reason(
    made: Callable[[Path], Path], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "saccade.models"):
        assert isinstance(loaded(made(tmp_path)).decoder, TextModel)
    assert f"slower than a known model's ({reason}" in caplog.text


def test_states_of_another_kind_stay_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_modules, "_KEEPS_STATES", {})
    with caplog.at_level(logging.WARNING, "saccade.models"):
        assert isinstance(loaded(ZOO["lfm2_vl"].build(tmp_path)).decoder, TextModel)
    assert "its layers keep states in another way than ours" in caplog.text


def test_the_log_says_which_decoder_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "saccade.models"):
        loaded(KINDS["llama"](tmp_path))
    assert "up to its decoder, which is one of ours" in caplog.text and "slower" not in caplog.text


def test_other_numbers_keep_transformers_layers_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(model: ModelBridge) -> dict[int, Rotation]:
        right = rotations_of(model)
        return dict.fromkeys(right, right[0]._replace(frequencies=2 * right[0].frequencies))

    folder = HALF(tmp_path)
    expected = logits(theirs(folder))
    monkeypatch.setattr(own_decoder, "rotations_of", wrong)
    with caplog.at_level(logging.WARNING, "saccade.models"):
        model = loaded(folder)
    assert isinstance(model.decoder, TextModel) and "with our layers its logits differ by" in caplog.text
    assert torch.equal(logits(model), expected)


def memory(model: ModelBridge) -> int:
    """Bytes of all tensors of the model and of our decoder, each once."""
    held = [*model.model.parameters(), *model.model.buffers()]
    if isinstance(model.decoder, Decoder):
        held += [model.decoder.table, model.decoder.head]
        assert model.params is not None
        held += [linear.weight for linear in model.params.linears]
        experts = [layer.mlp for layer in model.decoder.layers if isinstance(layer.mlp, MoE)]
        held += [weight for moe in experts for weight in (moe.gate_up, moe.down, moe.routers)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "fused queries, keys and values",
        "yarn, tied",
        "experts",
        "delta nets, gates after attention",
    ],
)
def test_each_weight_is_held_once(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    before, after = theirs(folder), loaded(folder)
    assert memory(after) <= memory(before)
    assert not list(after.text.layers.parameters())


def test_the_digest_of_a_tower_is_the_same(tmp_path: Path) -> None:
    folder = KINDS["llama"](tmp_path)
    before, after = (dict(model.encoder_weights()) for model in (theirs(folder), loaded(folder)))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("above", [0, 1])
def test_norms_are_read_by_their_numbers(above: int) -> None:
    """Some add one to their weights."""
    ours = RMSNorm(Parameters(torch.float32, torch.device("meta")), 8, 1e-6)
    theirs = nn.RMSNorm(8, eps=1e-5)
    weight = nn.init.uniform_(theirs.weight)
    theirs.register_forward_hook(lambda _, given, out: out + above * F.rms_norm(given[0], (8,), eps=1e-5))
    own_modules.set_norm(ours, theirs)
    assert ours.eps == 1e-5
    torch.testing.assert_close(ours.weight, weight.detach() + above)
    with pytest.raises(Unfit, match="its LayerNorm is no RMS norm like ours"):
        own_modules.set_norm(ours, nn.LayerNorm(8))


@needs_onednn
@pytest.mark.parametrize("kind", ["llama", "yarn, tied"])
def test_on_a_cpu_its_weights_are_packed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_packing, "_MIN_WEIGHT", 0)
    monkeypatch.setattr(weight_packing, "is_aarch64", lambda: False)
    model: Any = loaded(KINDS[kind](tmp_path))
    expected = logits(model)
    is_tied = model.decoder.head is model.decoder.table
    assert is_tied == ("tied" in kind)
    weight_packing.pack_where_faster(model, torch.float32, CPU)
    assert all(linear.weight.is_mkldnn for linear in model.params.linears)
    assert model.decoder.head.is_mkldnn != is_tied
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["glm4v", "gemma3", "gemma4@moe"])
def test_its_kernels_give_the_tokens_of_its_pytorch_pass(family: str, tmp_path: Path) -> None:
    entry = ZOO[family]
    folder = str(entry.build(tmp_path))
    imaged = {"prompt": f"{entry.image}What is it?", "multi_modal_data": {"image": make_photo(60, 50)}}
    prompts = [imaged, {"prompt": "The quick brown fox jumps."}]
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 1024, **entry.options}
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(folder, **{**OPTIONS, **sizes}) as llm:
        assert isinstance(llm.engine.core.runner.model.decoder, Decoder)
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, sampling, use_tqdm=False)]
    with overlapped(tmp_path, **sizes) as llm:
        found = [out.outputs[0].token_ids for out in llm.generate(prompts, sampling, use_tqdm=False)]
    assert found == expected
