"""Quantised weights of models that run through Transformers' code: they stay so, and compute what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade import LLM, SamplingParams, costs
from saccade.checkpoint.quantization import quantization_of
from saccade.models import load_model
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.stored import named_weights
from saccade.models.bridge.text_model import TextModel
from saccade.models.fp8_weights import FP8
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.moe import MoE
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.engine.async_engine import OPTIONS, answers, overlapped
from tests.helpers.families.bridged import transformers_layers
from tests.helpers.families.quantize import FORMATS, fp8_rows, quantize
from tests.helpers.families.zoo.wide import WIDE

pytestmark = pytest.mark.transformers

CPU = torch.device("cpu")
OURS, THEIRS = Decoder, TextModel
CASES = [
    ("internvl", "fp8-tensor", OURS, FP8),
    ("internvl@glm", "fp8-blocks", OURS, FP8),  # rows of queries and keys change places
    ("internvl@glm", "compressed-w4-zeros", OURS, torch.int16),
    ("glm4v_moe", "compressed-fp8", OURS, FP8),
    ("glm4v_moe", "awq", OURS, torch.int16),
    ("gemma3", "fp8-blocks", OURS, FP8),
    ("gemma3", "gptq-order", THEIRS, torch.int16),
]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on weights are kept as on a GPU."""

    def begin() -> None:
        for name in ("keeps_int4", "multiplies_fp8", "reads_int4_experts", "fp8_weights.multiplies_fp8"):
            monkeypatch.setattr(f"saccade.models.{name}", lambda *case: True)

    return begin


def loaded(folder: Path, **options: Any) -> ModelBridge:
    config = open_checkpoint(str(folder)).config
    model = load_model(folder, config, dtype=torch.float32, device=CPU, max_model_len=512, **options)
    assert isinstance(model, ModelBridge)
    return model


def decoder_weights(model: ModelBridge) -> list[torch.Tensor]:
    """Of its layers, but for norms and routers."""
    if model.params is None:
        return [tensor for _, tensor in named_weights(model.text.layers) if tensor.dim() > 1]
    weights = [linear.weight for linear in model.params.linears]
    experts = [layer.mlp for layer in model.decoder.layers if isinstance(layer.mlp, MoE)]
    return weights + [weight for moe in experts for weight in (moe.gate_up, moe.down)]


@torch.inference_mode()
def logits(model: ModelBridge) -> torch.Tensor:
    """Of some text, in PyTorch."""
    kv = PagedKV.allocate(model.config.text, 2, 16, model.dtype, CPU)
    attention = PagedAttention(
        kv, AttentionBatch([20], [20], torch.tensor([[0, 1]]), torch.arange(20), 16), model.decoder.scale
    )
    positions = torch.arange(20).repeat(model.axes + (model.config.text.blocks is not None), 1)
    positions[model.axes :] = 0  # no token sees those after it
    return model.logits(model.forward(model.embed(torch.arange(20) + 5), positions, attention))


@pytest.mark.parametrize(("family", "how", "kind", "dtype"), CASES)
def test_layers_keep_what_is_stored_and_compute_the_same(
    family: str, how: str, kind: type, dtype: torch.dtype, tmp_path: Path, on_a_gpu: Callable[[], None]
) -> None:
    quantize(WIDE[family].build(tmp_path / "plain"), tmp_path / "stored", how)
    expected = loaded(tmp_path / "stored")  # a CPU dequantises
    assert not any(weight.dtype == dtype for weight in decoder_weights(expected))
    on_a_gpu()
    with nullcontext() if kind is OURS else transformers_layers():
        model = loaded(tmp_path / "stored")
    assert isinstance(model.decoder, kind)
    kept = sum(weight.dtype == dtype for weight in decoder_weights(model))
    assert kept >= sum(weight.dtype == torch.float32 and weight.shape[-1] > 100 for weight in decoder_weights(model))
    torch.testing.assert_close(logits(model), logits(expected), atol=1e-4, rtol=1e-4)


def test_what_is_not_of_its_layers_is_dequantised(tmp_path: Path, on_a_gpu: Callable[[], None]) -> None:
    """A head in float8, and a projector."""
    folder = WIDE["internvl"].build(tmp_path)
    expected = loaded(folder)
    stored = load_file(folder / "model.safetensors")
    heads = [name for name, weight in stored.items() if weight.dim() == 2 and weight.shape[1] % 128 == 0]
    apart = [name for name in heads if ".layers." not in name and "embed" not in name]
    for name in apart:
        parts, _ = fp8_rows(stored.pop(name))
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    on_a_gpu()
    model = loaded(folder)
    assert apart and model.decoder.head.dtype == torch.float32
    assert 0 < (logits(model) - logits(expected)).norm() < 0.05 * logits(expected).norm()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_layers_are_quantised_while_they_load_and_the_plan_counts_them(
    load_format: str, tmp_path: Path, on_a_gpu: Callable[[], None]
) -> None:
    folder = WIDE["glm4v_moe"].build(tmp_path)
    expected = loaded(folder)
    on_a_gpu()
    model = loaded(folder, quantize="fp8", load_format=load_format)
    kept = [weight for weight in decoder_weights(model) if weight.dtype == FP8]
    assert sum(weight.numel() for weight in kept) == costs.fp8_params_of(model.config, None, "fp8") > 0
    assert model.decoder.head.dtype == torch.float32
    if load_format == "auto":
        ours, theirs = (each.decoder.layers[0].attention for each in (model, expected))
        for one, other in ((ours.qkv, theirs.qkv), (ours.out, theirs.out)):
            assert (one.dequantized(torch.float32) - other.weight).norm() < 0.04 * other.weight.norm()


def test_the_plan_counts_int4(tmp_path: Path, on_a_gpu: Callable[[], None]) -> None:
    folder = WIDE["glm4v_moe"].build(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(FORMATS["awq"].config)}))
    on_a_gpu()
    model = loaded(folder, load_format="dummy")
    quantization = quantization_of(model.config.raw, folder)
    assert quantization is not None and model.params is not None
    packed = [(linear.weight, linear.groups) for linear in model.params.linears if linear.groups is not None]
    experts = model.decoder.layers[1].mlp
    packed += [(experts.gate_up, experts.gate_up_scales), (experts.down, experts.down_scales)]
    taken = sum(part.nbytes for weight, beside in packed for part in (weight, *beside) if part is not None)
    whole = sum(4 * 4 * weight.numel() for weight, _ in packed)
    int4 = costs.Int4Bytes(quantization.int4_bytes, True)
    assert whole - taken == costs.saved_bytes(model.config.text, "float32", fp8=0, int4=int4)


@pytest.mark.parametrize(
    ("family", "how", "kind"),
    [
        ("glm4v_moe", "fp8-blocks", OURS),
        pytest.param("gemma3", "fp8-blocks", THEIRS, marks=pytest.mark.conformance),
        pytest.param("gemma3", "awq", OURS, marks=pytest.mark.conformance),
    ],
)
def test_kernels_answer_as_dequantised_weights_do(
    family: str, how: str, kind: type, tmp_path: Path, on_a_gpu: Callable[[], None]
) -> None:
    quantize(WIDE[family].build(tmp_path / "plain"), tmp_path / "stored", how)
    given, few = [{"prompt": "Five."}], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    options = {"dtype": "float16" if how == "awq" else "float32"}
    with LLM(str(tmp_path / "stored"), **{**OPTIONS, **options}) as llm:  # a CPU dequantises
        expected = answers(llm, given, few)
    on_a_gpu()
    layers = nullcontext() if kind is OURS else transformers_layers()
    with layers, overlapped(tmp_path / "stored", **options) as llm:
        model = llm.engine.core.runner.model
        assert isinstance(model.decoder, kind)
        assert {weight.dtype for weight in decoder_weights(model)} & {FP8, torch.int16}
        assert answers(llm, given, few) == expected
