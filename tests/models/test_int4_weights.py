"""Weights that stay packed in INT4: which, and that a model with them computes as with the dequantised ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import saccade.models
from saccade import costs
from saccade.checkpoint.config import model_config
from saccade.checkpoint.quantization import quantization_of
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.models.int4_weights import (
    GroupScales,
    Int4Format,
    Int4Weights,
    dequantized,
    fill_packed,
    inputs_of,
    order_of,
    pack,
)
from saccade.models.layers.moe import MoE
from saccade.models.state_dict import Parameters
from tests.helpers.families.quantize import FORMATS, gptq, packed_ints
from tests.helpers.families.quantized_text import LEFT_OUT, TEXT, load, published_names
from tests.helpers.kernels.moe import config as moe_config

CPU = torch.device("cpu")
KEPT = ["awq", "awq-32", "gptq", "gptq-order", "gptq-v2", "compressed-w4-32", "compressed-w4-64", "compressed-w4-128",
        "compressed-w4-zeros", "compressed-w4-order"]  # fmt: skip


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay packed here as they would there; PyTorch dequantises them for each GEMM."""
    monkeypatch.setattr(saccade.models, "keeps_int4", lambda device: True)
    monkeypatch.setattr(saccade.models, "reads_int4_experts", lambda *case: True)


def write_checkpoint(folder: Path, name: str, text: dict[str, Any] = TEXT, left_out: str = LEFT_OUT) -> dict[str, Any]:
    """A model of random weights, its linear layers and experts in INT4 but for one. Returns config.json."""
    plain = load_model(None, model_config(text), dtype=torch.float32, device=CPU, load_format="dummy", seed=4)
    stored = {}
    for full, tensor in published_names(plain).items():
        if tensor.dim() == 2 and ".layers." in full and "gate.weight" not in full and left_out not in full:
            parts, _ = FORMATS[name].pack(tensor)
            stored |= {full.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[full] = tensor
    config = {**text, "quantization_config": dict(FORMATS[name].config)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({full: tensor.contiguous().clone() for full, tensor in stored.items()}, folder / "model.safetensors")
    return config


def assert_same(found: Any, expected: Any) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(found.decoder.layers, expected.decoder.layers, strict=True):
        assert torch.allclose(ours.attention.qkv(x), theirs.attention.qkv(x), atol=1e-5)
        assert torch.allclose(ours.attention.out(x), theirs.attention.out(x), atol=1e-5)
        assert torch.allclose(ours.mlp(x), theirs.mlp(x), atol=1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_a_model_keeps_what_is_stored_in_int4_and_computes_the_same(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="saccade")
    config = write_checkpoint(tmp_path, name)
    expected = load(tmp_path, config)  # a CPU dequantises
    assert "22 are dequantised as they load" in caplog.text
    request.getfixturevalue("on_a_gpu")
    found = load(tmp_path, config)
    layers, is_ordered = found.decoder.layers, "order" in name
    kept = "10 stay in INT4, 12 are dequantised as they load" if is_ordered else ": 22 stay in INT4"
    why = "2 projections of experts are dequantised, as kernels read none with an order of inputs (desc_act)"
    assert kept in caplog.text and (why in caplog.text) == is_ordered
    experts = layers[1].mlp
    assert experts.gate_up.dtype == experts.down.dtype == (torch.float32 if is_ordered else torch.int16)
    for linear in (layers[0].attention.qkv, layers[0].attention.out, layers[0].mlp.gate_up, layers[1].attention.qkv):
        assert linear.weight.dtype == torch.int16 and inputs_of(linear.weight) == linear.inputs
        assert (linear.groups.order is not None) == is_ordered
        assert (linear.groups.zeros is None) == (name.startswith("compressed") and "zeros" not in name)
    assert layers[1].attention.out.weight.dtype == torch.float32
    assert_same(found, expected)


def test_experts_are_dequantised_where_their_kernels_fail(
    tmp_path: Path, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="saccade")
    monkeypatch.setattr(saccade.models, "reads_int4_experts", lambda *case: False)
    layers = load(tmp_path, write_checkpoint(tmp_path, "awq")).decoder.layers
    assert "10 stay in INT4, 12 are dequantised as they load" in caplog.text
    assert layers[0].mlp.down.weight.dtype == torch.int16 and layers[1].mlp.down.dtype == torch.float32


@pytest.mark.parametrize("width", [384, 768])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_shared_expert_is_stacked_only_if_it_is_packed_too(
    width: int, is_packed: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = {**TEXT, "shared_expert_intermediate_size": width}
    config = write_checkpoint(tmp_path, "gptq-v2", text, LEFT_OUT if is_packed else "shared_expert")
    expected = load(tmp_path, config)
    request.getfixturevalue("on_a_gpu")
    found = load(tmp_path, config)
    experts = found.decoder.layers[1].mlp
    assert experts.gate_up.dtype == experts.down.dtype == torch.int16
    assert len(experts.down) == 4 + (width // 384 if is_packed else 0)
    assert experts.shared is None if is_packed else experts.shared.down.weight.dtype == torch.float32
    assert_same(found, expected)


def test_a_shared_expert_of_other_groups_runs_apart() -> None:
    layer = "decoder.layers.0.mlp"
    own, other = (Int4Format(group, has_zeros=False, dtype=torch.float16) for group in (32, 128))
    routed = [f"{layer}.{expert}.{name}.weight" for expert in range(8) for name in ("gate", "up", "down")]
    shared = [f"{layer}.shared.{name}.0.weight" for name in ("gate_up.gate", "gate_up.up", "down")]
    for formats, is_stacked in ((dict.fromkeys(shared, own), True), (dict.fromkeys(shared, other), False)):
        kept = Int4Weights({**dict.fromkeys(routed, own), **formats})
        params = Parameters(torch.float16, CPU, quantized=kept)
        for level in layer.split("."):
            params = params.within(level)
        made = MoE(params, 128, moe_config(width=128, shared=128))
        assert made.gate_up.dtype == made.down.dtype == torch.int16
        assert (made.shared is None) is is_stacked and len(made.down) == 8 + is_stacked


def test_parts_in_different_orders_are_dequantised_together(
    tmp_path: Path, on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="saccade")
    config = write_checkpoint(tmp_path, "gptq-order")
    stored = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.self_attn.k_proj"
    rows = torch.randn(128, 256, generator=torch.Generator().manual_seed(2))
    stored |= {f"{key}.{part}": value for part, value in gptq(rows, 32)[0].items()}
    save_file(stored, tmp_path / "model.safetensors")
    found = load(tmp_path, config)
    assert "1 projections are dequantised, as their parts differ in INT4" in caplog.text
    assert "decoder.layers.0.qkv.q" in caplog.text
    assert found.decoder.layers[0].attention.qkv.weight.dtype == torch.float32
    assert found.decoder.layers[0].mlp.gate_up.weight.dtype == torch.int16


def test_whole_rows_eight_bits_and_odd_widths_are_dequantised(on_a_gpu: None, tmp_path: Path) -> None:
    for name in ("compressed-w8", "gptq-8"):
        found = load(tmp_path, write_checkpoint(tmp_path, name))
        assert found.decoder.layers[0].attention.qkv.groups is None
    config = write_checkpoint(tmp_path, "compressed-w4-32")
    stored = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.down_proj"
    stored |= {f"{key}.{part}": value for part, value in packed_ints(torch.randn(256, 256), 256)[0].items()}
    save_file(stored, tmp_path / "model.safetensors")
    layers = load(tmp_path, config).decoder.layers
    assert layers[0].mlp.down.groups is None and layers[0].mlp.gate_up.groups is not None


@pytest.mark.parametrize("name", ["awq", "compressed-w4-32"])
def test_random_weights_are_of_the_kind_that_the_config_says(name: str, on_a_gpu: None, tmp_path: Path) -> None:
    config = {**TEXT, "quantization_config": dict(FORMATS[name].config)}
    model = load(tmp_path, config, load_format="dummy")
    gate_up = model.decoder.layers[0].mlp.gate_up
    assert gate_up.weight.shape == (512, 64) and gate_up.groups is not None
    assert (gate_up.groups.zeros is None) == (name != "awq")
    weight = dequantized(gate_up.weight, gate_up.groups, torch.float32)
    assert abs(weight.std().item() * 256**0.5 - 1) < 0.1
    experts = model.decoder.layers[1].mlp
    assert experts.gate_up.shape == (4, 768, 64) and experts.down.dtype == torch.int16
    down = dequantized(experts.down[0], experts.down_scales.at(0), torch.float32)
    assert abs(down.std().item() * 384**0.5 - 1) < 0.1
    assert model.decoder.table.dtype == torch.float32


@pytest.mark.parametrize("zeros", [None, torch.empty(512, 8, dtype=torch.uint8)])
def test_random_weights_have_no_mean_by_which_tokens_would_become_alike(zeros: torch.Tensor | None) -> None:
    weight, scales = torch.empty(512, 256, dtype=torch.int16), torch.empty(512, 8, dtype=torch.float16)
    fill_packed(weight, GroupScales(scales, zeros), torch.Generator().manual_seed(2))
    found = dequantized(weight, GroupScales(scales, zeros), torch.float32)
    assert abs(found.std().item() * 1024**0.5 - 1) < 0.02
    assert abs(found.mean() / found.std()) < 0.02


@pytest.mark.parametrize("has_experts", [True, False])
def test_the_memory_that_is_planned_for_packed_weights_is_what_they_take(
    has_experts: bool, on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saccade.models, "reads_int4_experts", lambda *case: has_experts)
    config = {**TEXT, "quantization_config": dict(FORMATS["awq"].config)}
    model = load(tmp_path, config, load_format="dummy")
    packed = [(linear.weight, linear.groups) for linear in model.params.linears if linear.groups is not None]
    experts = model.decoder.layers[1].mlp
    if has_experts:
        packed += [(experts.gate_up, experts.gate_up_scales), (experts.down, experts.down_scales)]
    assert len(packed) == (8 if has_experts else 6)
    taken = sum(part.nbytes for weight, beside in packed for part in (weight, *beside) if part is not None)
    stored = quantization_of(config, tmp_path)
    assert stored is not None
    whole = sum(4 * weight.numel() for weight, _ in packed)
    int4 = costs.Int4Bytes(stored.int4_bytes, has_experts)
    assert 4 * whole - taken == costs.saved_bytes(model_config(config).text, "float32", fp8=0, int4=int4)


def test_columns_come_back_in_the_order_of_the_inputs() -> None:
    values = torch.randint(0, 16, (3, 128), generator=torch.Generator().manual_seed(1))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    scales = GroupScales(torch.ones(3, 1, dtype=torch.float16), order=order)
    assert torch.equal(dequantized(pack(values[:, order]), scales, torch.float32), values.float() - 8)


@pytest.mark.parametrize(
    ("name", "part", "tensor", "problem"),
    [
        ("compressed-w4-32", "weight_shape", torch.tensor([256]), r"its weight_shape is \[256\], not two sizes"),
        ("compressed-w4-32", "weight_shape", torch.ones(2), "its weight_shape is float32, and whole numbers"),
        ("compressed-w4-32", "weight_packed", torch.ones(8).int(), r"its weight_packed has the shape \[8\], not rows"),
        ("compressed-w4-32", "weight_scale", torch.ones(256, 0), r"its weight_scale has the shape \[256, 0\], not"),
        ("compressed-w4-32", "weight_scale", torch.ones(5, 8), r"its weight_scale has the shape \[5, 8\] for 256 rows"),
        ("compressed-w4-zeros", "weight_zero_point", torch.ones(9, 2).int(), "its weight_zero_point holds"),
        ("compressed-w4-order", "weight_g_idx", torch.zeros(9).int(), "its weight_g_idx has 9 numbers for 256 inputs"),
        ("gptq", "qweight", torch.ones(8).int(), r"its qweight has the shape \[8\], not rows and columns"),
        ("gptq", "scales", torch.ones(2).half(), r"its scales has the shape \[2\], not rows and columns"),
        ("awq", "qzeros", torch.ones(1, 1, 1).int(), r"its qzeros has the shape \[1, 1, 1\], not rows and columns"),
    ],
)  # fmt: skip
def test_a_malformed_part_is_named_with_its_layer(
    name: str, part: str, tensor: torch.Tensor, problem: str, on_a_gpu: None, tmp_path: Path
) -> None:
    config = write_checkpoint(tmp_path, name)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    assert f"{layer}.{part}" in stored
    save_file({**stored, f"{layer}.{part}": tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^{layer}.weight cannot be (read|dequantised): {problem}"):
        load(tmp_path, config)


def test_groups_of_different_sizes_are_refused() -> None:
    assert order_of(torch.arange(8) // 4, 4) is None
    assert order_of(torch.tensor([1, 0, 0, 1]), 2) is not None
    with pytest.raises(ValueError, match="its groups are not of 2 columns each"):
        order_of(torch.tensor([0, 0, 0, 1]), 2)
