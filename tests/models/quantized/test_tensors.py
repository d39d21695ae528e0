"""Every published layout, read as the weights that it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.checkpoint.quantization import quantization_of
from saccade.errors import ConfigError
from saccade.models.quantized import dequantize
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.tensor_files import TensorFiles
from saccade.models.weights import Rule, load_weights
from tests.helpers.families.quantize import FORMATS, Packed, fp8_blocks, fp8_tensor, gptq, nvfp4, pack, quantize

CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.up_proj"


def random_weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.1


def opened(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> DequantizedTensors:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    quantization = quantization_of({"quantization_config": config}, folder)
    assert quantization is not None
    return DequantizedTensors(TensorFiles(folder), quantization, CPU)


def named(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{LAYER}.{part}": tensor for part, tensor in parts.items()}


@pytest.mark.parametrize("shape", [(72, 256), (136, 640)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_layout_stands_for_the_weights_it_was_made_from(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    weight = random_weight(*shape)
    parts, meant = FORMATS[name].pack(weight)
    tensors = opened(tmp_path, dict(FORMATS[name].config), named(parts))
    assert list(tensors.file_of) == [f"{LAYER}.weight"]
    found = tensors.read(f"{LAYER}.weight")
    assert torch.allclose(found, meant, rtol=1e-6, atol=1e-7)
    assert (found - weight).norm() / weight.norm() < 0.2  # and those are near the weights that were quantised


def test_layers_that_the_file_leaves_out_stay_as_they_are(tmp_path: Path) -> None:
    parts, _ = fp8_blocks(random_weight(8, 8))
    plain = random_weight(5, 3)
    tensors = opened(tmp_path, {"quant_method": "fp8"}, {**named(parts), "visual.proj.weight": plain})
    assert torch.equal(tensors.read("visual.proj.weight"), plain)


def test_blocks_may_be_cut_at_both_edges(tmp_path: Path) -> None:
    parts, meant = fp8_blocks(random_weight(130, 257))
    assert parts["weight_scale_inv"].shape == (2, 3)
    tensors = opened(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]}, named(parts))
    assert torch.equal(tensors.read(f"{LAYER}.weight"), meant)


@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
def test_experts_in_one_tensor_have_a_scale_each_or_for_each_block(ending: str, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    packed = [fp8_blocks(weight, 16) for weight in random_weight(3, 40, 32)]
    numbers, scales = (torch.stack([parts[part] for parts, _ in packed]) for part in ("weight", "weight_scale_inv"))
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    tensors = opened(tmp_path, config, {name: numbers, name + ending: scales})
    assert list(tensors.file_of) == [name]
    assert torch.equal(tensors.read(name), torch.stack([meant for _, meant in packed]))


def test_int8_with_zero_points_is_read(tmp_path: Path) -> None:
    groups = {"group_0": {"weights": {"num_bits": 8, "symmetric": False}}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    numbers = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    zeros = torch.tensor([[1], [-1]], dtype=torch.int8)
    parts = {"weight": numbers, "weight_scale": torch.tensor([[1.0], [2.0]]), "weight_zero_point": zeros}
    found = opened(tmp_path, config, named(parts)).read(f"{LAYER}.weight")
    assert found.tolist() == [[0.0, 1.0], [8.0, 10.0]]


def test_scales_in_another_file_are_found(tmp_path: Path) -> None:
    parts, meant = fp8_tensor(random_weight(4, 8))
    save_file({f"{LAYER}.weight": parts.pop("weight")}, tmp_path / "model-1.safetensors")
    save_file(named(parts), tmp_path / "model-2.safetensors")
    quantization = quantization_of({"quantization_config": {"quant_method": "fp8"}}, tmp_path)
    assert quantization is not None
    tensors = DequantizedTensors(TensorFiles(tmp_path), quantization, CPU)
    assert torch.equal(tensors.read(f"{LAYER}.weight"), meant)


def test_a_bias_of_zeros_that_gptq_adds_is_left_out_and_another_is_an_error(tmp_path: Path) -> None:
    parts, meant = gptq(random_weight(8, 128))
    config = {"quant_method": "gptq", "bits": 4}
    rules = (Rule("model.layers.{}.mlp.up_proj.*", "up.{}.*"),)
    for bias, is_refused in ((torch.zeros(8), False), (torch.ones(8), True)):
        tensors = opened(tmp_path, config, {**named(parts), f"{LAYER}.bias": bias})
        target = torch.empty(8, 128)
        if is_refused:
            with pytest.raises(ConfigError, match=r"no place for \(model.layers.0.mlp.up_proj.bias\)"):
                load_weights(tensors, {"up.0.weight": target}, rules, progress=False)
        else:
            load_weights(tensors, {"up.0.weight": target}, rules, progress=False)
            assert torch.allclose(target, meant)


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-order"])
def test_an_engine_answers_as_with_the_weights_that_are_meant(name: str, qwen2_vl_folder: Path, tmp_path: Path) -> None:
    meant = quantize(qwen2_vl_folder, tmp_path / "quantised", name)
    assert len(meant) >= 7
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in qwen2_vl_folder.iterdir():
        if file.suffix != ".safetensors":
            (plain / file.name).write_bytes(file.read_bytes())
    whole = TensorFiles(qwen2_vl_folder)
    save_file({key: meant.get(key, whole.read(key)) for key in whole.file_of}, plain / "model.safetensors")
    answers = []
    for folder in (plain, tmp_path / "quantised"):
        with LLM(model=str(folder), dtype="float32", kv_cache_gb=0.1, max_model_len=256) as llm:
            out = llm.generate("One two three", SamplingParams(temperature=0, max_tokens=12))[0]
        answers.append(out.outputs[0].token_ids)
    assert answers[0] == answers[1]


# --- what cannot be read -------------------------------------------------------------------------------------------


PACKED = {"weight_packed": pack(torch.zeros(4, 8), 4, 1), "weight_scale": torch.ones(4, 1)}


def broken(**changes: Tensor | None) -> dict[str, Tensor]:
    return changed(gptq(random_weight(8, 256)), changes)


def broken_fp4(**changes: Tensor | None) -> dict[str, Tensor]:
    return changed(nvfp4(random_weight(8, 64), is_modelopt=True), changes)


def changed(packed: Packed, changes: dict[str, Tensor | None]) -> dict[str, Tensor]:
    parts = {**packed[0], **changes}
    return named({part: tensor for part, tensor in parts.items() if tensor is not None})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (broken(scales=None), f"{LAYER}.weight cannot be dequantised: its scales is not in the checkpoint"),
        (broken(scales=torch.ones(2, 9)), "do not agree"),
        (broken(g_idx=torch.full((256,), 2)), "its g_idx names the group 2 of 2"),
        (broken(g_idx=torch.zeros(9)), "its g_idx has 9 numbers, and its qweight 32 rows of 4 or 8 inputs"),
        (broken(qweight=torch.zeros(32, 8)), "its qweight is float32, and whole numbers are needed"),
        (broken(scales=torch.full((2, 8), torch.nan)), "its scales has numbers that are not finite"),
        (named({**PACKED, "weight_shape": torch.tensor([4, 8, 1])}), r"its weight_shape is \[4, 8, 1\], not two sizes"),
        (broken_fp4(weight_scale_2=None), "its weight_scale_2 is not in the checkpoint"),
        (broken_fp4(weight_scale_2=torch.ones(3)), "its weight_scale_2 has 3 numbers, not one"),
        (named({"weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}), "stored as float8_e4m3fn without a scale"),
        (
            named({"weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(3, 1)}),
            r"dimension 0 of its scale has 3 numbers, not 1, 4 or 1 \(blocks of 128\)",
        ),
        (
            named(PACKED),
            "its weight_shape is not in the checkpoint",
        ),
    ],
)
def test_a_weight_that_cannot_be_read_is_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, {"quant_method": "gptq", "bits": 4}, tensors).read(f"{LAYER}.weight")


def test_a_scale_without_its_weight_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"has {LAYER}.weight_scale and not the weight itself"):
        opened(tmp_path, {"quant_method": "fp8"}, named({"weight_scale": torch.ones(1)}))


def test_numbers_are_unpacked_along_either_dimension() -> None:
    values = torch.randint(0, 16, (16, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    for dim in (0, 1):
        assert torch.equal(dequantize.unpack(pack(values, 4, dim), 4, dim), values)


def test_modelopt_may_describe_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    assert quantization_of({}, tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(ConfigError, match=r"quantization in hf_quant_config\.json must be an object, not 'FP8'"):
        quantization_of({}, tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    found = quantization_of({}, tmp_path)
    assert found is not None and (found.method, found.summary) == ("modelopt", "NVFP4")


def test_quantised_weights_that_the_config_does_not_mention_are_named_as_such(tmp_path: Path) -> None:
    save_file(named(gptq(random_weight(8, 256))[0]), tmp_path / "model.safetensors")
    rules = (Rule("model.layers.{}.mlp.up_proj.*", "up.{}.*"),)
    with pytest.raises(ConfigError, match=r"up_proj\.qweight, .*; they are of quantised weights that its quantization"):
        load_weights(TensorFiles(tmp_path), {"up.0.weight": torch.empty(8, 256)}, rules, progress=False)


def test_a_folder_of_gguf_files_is_refused_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds no .safetensors file; model-Q4_K_M.gguf cannot be read, take"):
        TensorFiles(tmp_path)
