"""Weights that stay in float8: which, and that a model with them computes as with the dequantised ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import saccade.models
from saccade.checkpoint.config import model_config
from saccade.checkpoint.quantization import quantization_of
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.models.fp8_weights import FP8, check_online, dequantized, is_by_row, is_in_blocks, quantized, scales_for
from saccade.models.layers.linear import Linear
from tests.helpers.families.quantize import fp8_blocks, fp8_rows, fp8_tensor, mxfp4, nvfp4
from tests.helpers.families.quantized_text import LEFT_OUT, TEXT, load, published_names

CPU = torch.device("cpu")
PACKERS = {
    "blocks": fp8_blocks, "rows": fp8_rows, "tensor": fp8_tensor, "MXFP4": mxfp4,
    "NVFP4": lambda weight: nvfp4(weight, is_modelopt=True),
}  # fmt: skip


def write_checkpoint(folder: Path, kind: str) -> dict[str, Any]:
    """A model of random weights, its linear layers in float8 but for one. Returns config.json."""
    folder.mkdir(exist_ok=True)
    how = {"quant_method": "modelopt", "quant_algo": kind} if kind.endswith("FP4") else {"quant_method": "fp8"}
    config = {**TEXT, "quantization_config": how}
    plain = load_model(None, model_config(TEXT), dtype=torch.float32, device=CPU, load_format="dummy", seed=4)
    stored = {}
    for name, tensor in published_names(plain).items():
        if tensor.dim() == 2 and ".layers." in name and "mlp.gate." not in name and LEFT_OUT not in name:
            parts, _ = PACKERS[kind](tensor)
            stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[name] = tensor
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, folder / "model.safetensors")
    return config


@pytest.mark.parametrize("kind", ["blocks", "rows", "tensor"])
def test_a_model_keeps_what_is_stored_in_float8_and_computes_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="saccade")
    config = write_checkpoint(tmp_path, kind)
    expected = load(tmp_path, config)  # a CPU dequantises
    assert "22 weights are stored as FP8: 22 are dequantised as they load" in caplog.text
    asked = load(tmp_path, config, quantize="fp8")  # which it is, so nothing changes
    assert asked.decoder.layers[0].mlp.gate_up.weight.dtype == torch.float32
    monkeypatch.setattr(saccade.models, "multiplies_fp8", lambda device: True)
    found = load(tmp_path, config)
    assert caplog.text.rstrip().endswith("22 weights are stored as FP8: 22 stay in FP8")
    layers = found.decoder.layers
    assert layers[0].mlp.gate_up.weight.dtype == layers[1].attention.qkv.weight.dtype == FP8
    assert layers[1].mlp.gate_up.dtype == layers[1].mlp.down.dtype == FP8
    assert layers[1].attention.out.weight.dtype == torch.float32  # the file leaves it out
    assert not any(linear.scales is not None for linear in expected.params.linears)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(layers, expected.decoder.layers, strict=True):
        assert torch.allclose(ours.attention.qkv(x), theirs.attention.qkv(x), atol=1e-5)
        assert torch.allclose(ours.mlp(x), theirs.mlp(x), atol=1e-5)


@pytest.mark.parametrize(("kind", "error"), [("MXFP4", 0.0), ("NVFP4", 0.025)])
def test_a_model_in_fp4_becomes_fp8_and_loses_little(
    kind: str, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of MXFP4 nothing: its scales are powers of two. FP4 itself is 10% away from what was quantised."""
    caplog.set_level("INFO", logger="saccade")
    config = write_checkpoint(tmp_path, kind)
    expected = load(tmp_path, config)
    monkeypatch.setattr(saccade.models, "multiplies_fp8", lambda device: True)
    found = load(tmp_path, config, quantize="fp8")  # which it becomes anyway
    assert f"22 weights are stored as {kind}: 22 become FP8, since no kernel here multiplies FP4" in caplog.text
    pairs = list(zip(found.params.linears, expected.params.linears, strict=True))
    assert [ours.weight.dtype for ours, _ in pairs].count(FP8) == len(pairs) - 1  # but for the one left out
    for ours, theirs in pairs:
        weight = ours.weight if ours.scales is None else dequantized(ours.weight, ours.scales, torch.float32)
        assert (weight - theirs.weight).norm() <= error * theirs.weight.norm()
    experts, others = found.decoder.layers[1].mlp, expected.decoder.layers[1].mlp
    weight = dequantized(experts.down, experts.down_scales, torch.float32)
    assert experts.down.dtype == FP8 and (weight - others.down).norm() <= error * others.down.norm()


def test_stacked_experts_are_read_with_their_scales_as_they_are_turned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[experts, in, out], as some checkpoints have them."""
    config = write_checkpoint(tmp_path, "blocks")
    expected = load(tmp_path, config)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.1.mlp.experts."
    for part in ("weight", "weight_scale_inv"):
        gates, ups, downs = (
            torch.stack([stored.pop(f"{prefix}{expert}.{name}_proj.{part}") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        ending = "" if part == "weight" else "_scale_inv"
        stored[f"{prefix}gate_up_proj{ending}"] = torch.cat((gates, ups), dim=1).mT.contiguous()
        stored[f"{prefix}down_proj{ending}"] = downs.mT.contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setattr(saccade.models, "multiplies_fp8", lambda device: True)
    experts = load(tmp_path, config).decoder.layers[1].mlp
    assert experts.gate_up.dtype == FP8
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(experts(x), expected.decoder.layers[1].mlp(x), atol=1e-5)


def test_a_checkpoint_is_quantised_while_it_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("saccade.models.fp8_weights.multiplies_fp8", lambda device: True)
    plain = load_model(None, model_config(TEXT), dtype=torch.float32, device=CPU, load_format="dummy", seed=4)
    save_file({n: t.contiguous().clone() for n, t in published_names(plain).items()}, tmp_path / "model.safetensors")
    model = load(tmp_path, TEXT, quantize="fp8")
    linears = [linear for linear in model.params.linears if isinstance(linear, Linear)]
    assert all(linear.weight.dtype == FP8 for linear in linears)
    for ours, theirs in zip(linears, plain.params.linears, strict=True):  # type: ignore[attr-defined]
        assert ours.scales is not None
        difference = dequantized(ours.weight, ours.scales, torch.float32) - theirs.weight
        assert difference.norm() / theirs.weight.norm() < 0.04
    assert model.decoder.table.dtype == torch.float32


def test_experts_are_quantised_as_they_are_turned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """[experts, in, out]: scales are of the rows that a GEMM has."""
    monkeypatch.setattr("saccade.models.fp8_weights.multiplies_fp8", lambda device: True)
    plain: Any = load_model(None, model_config(TEXT), dtype=torch.float32, device=CPU, load_format="dummy", seed=4)
    experts = plain.decoder.layers[1].mlp
    stored = {name: tensor for name, tensor in published_names(plain).items() if ".experts." not in name}
    stored["model.layers.1.mlp.experts.gate_up_proj"] = experts.gate_up.mT
    stored["model.layers.1.mlp.experts.down_proj"] = experts.down.mT
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    found = load(tmp_path, TEXT, quantize="fp8").decoder.layers[1].mlp
    expected, scales = quantized(experts.gate_up, in_blocks=False)
    assert torch.equal(found.gate_up.float(), expected.float()) and torch.equal(found.gate_up_scales, scales)


def test_quantising_needs_a_gpu_that_multiplies_float8() -> None:
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or more, not cpu"):
        check_online("fp8", None, CPU)
    with pytest.raises(ConfigError, match="--quantization int3 is not known"):
        check_online("int3", None, CPU)
    awq = quantization_of({"quantization_config": {"quant_method": "awq", "bits": 4}}, Path())
    with pytest.raises(ConfigError, match="for checkpoints that are not quantised; this one is AWQ in 4 bits"):
        check_online("fp8", awq, CPU)


@pytest.mark.parametrize("in_blocks", [True, False])
def test_quantising_twice_gives_the_same(in_blocks: bool) -> None:
    weight = torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(1))
    values, scales = quantized(weight, in_blocks)
    again, same = quantized(dequantized(values, scales, torch.float32), in_blocks)
    assert torch.equal(again.float(), values.float()) and torch.allclose(same, scales)
    zeros, _ = quantized(torch.zeros(128, 128), in_blocks)
    assert not zeros.float().any()


def test_scales_of_every_published_shape_fit() -> None:
    assert scales_for(torch.tensor(2.0), (4, 1)).tolist() == [[2.0]] * 4
    assert scales_for(torch.arange(4), (4, 1)).tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert scales_for(torch.ones(4, 1), (2, 4, 1)).shape == (2, 4, 1)  # cut by columns: parts have the same rows
    assert scales_for(torch.arange(8).view(2, 4), (2, 2, 2))[1].tolist() == [[2.0, 3.0], [6.0, 7.0]]
    with pytest.raises(ValueError, match=r"shape \[3, 5\]; \[4, 1\] was expected"):
        scales_for(torch.ones(3, 5), (4, 1))
    assert is_in_blocks([2, 3], [256, 384]) and not is_in_blocks([256, 1], [256, 384])
    assert is_by_row([], [256, 384]) and is_by_row([256], [256, 384]) and is_by_row([256, 1], [256, 384])
    assert not is_by_row([2, 3], [256, 384])


def test_what_a_config_says_decides_random_weights() -> None:
    for config, is_fp8, has_blocks in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True, True),
        ({"quant_method": "fbgemm_fp8"}, True, False),
        ({"quant_method": "awq", "bits": 4}, False, False),
    ):
        found = quantization_of({"quantization_config": config}, Path("."))
        assert found is not None and (found.is_fp8, found.has_blocks) == (is_fp8, has_blocks)
