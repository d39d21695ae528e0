"""What a quantization_config says, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saccade.checkpoint.quantization import Quantization, quantization_of
from saccade.errors import ConfigError

GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 32]}}


def read(config: dict[str, Any], *, nested: bool = False) -> Quantization | None:
    raw = {"quantization_config": config}
    return quantization_of({"text_config": raw} if nested else raw, Path("/nowhere"))


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization_config must be an object, not 'fp8'"):
        quantization_of({"text_config": {"quantization_config": "fp8"}}, Path("/nowhere"))


def test_blocks_bits_and_zero_points_are_read() -> None:
    found = read({"quant_method": "fp8", "weight_block_size": [128, 64]}, nested=True)
    assert found == Quantization("fp8", "FP8 in blocks of 128x64", (128, 64), has_blocks=True)
    assert not found.is_fp8  # it is dequantised
    found = read({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": GROUP}})
    assert found is not None and found.block == (64, 32)
    for version, offset in ((None, 1), ("gptq", 1), ("gptq_v2", 0)):
        found = read({"quant_method": "gptq", "bits": 8, "checkpoint_format": version})
        assert found is not None and (found.bits, found.zero_point_offset) == (8, offset)
    assert quantization_of({}, Path("/nowhere")) is None
    assert read({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}) is None


def packed(bits: int, **fields: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": bits, "group_size": 128, "symmetric": True, **fields}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"ignore": ["lm_head", "re:.*visual.*", "re:.*mlp.gate$", "re:.*shared_expert.*"]}, True),
        ({"ignore": ["re:.*layers.3.mlp.experts.*"]}, False),
        ({"ignore": ["model.language_model.layers.0.mlp"]}, False),
        ({"config_groups": {"a": packed(4), "b": packed(8)}}, False),
        ({"config_groups": {"a": packed(4), "b": packed(4, group_size=32)}}, False),
    ],
    ids=str,
)
def test_memory_is_planned_in_int4_only_where_all_experts_are(fields: dict[str, Any], expected: bool) -> None:
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": packed(4)}}
    found = read({**config, **fields})
    assert found is not None and found.is_int4 is expected


def test_gptq_and_awq_have_lists_of_their_own() -> None:
    gptq, awq = ({"quant_method": method, "bits": 4, "group_size": 128} for method in ("gptq", "awq"))
    for config in (gptq, awq):
        plain, skipping = (read({**config, "modules_to_not_convert": names}) for names in (["visual"], ["experts"]))
        assert plain is not None and skipping is not None
        assert plain.is_int4 and not skipping.is_int4
    found = read({**gptq, "dynamic": {"-:.*mlp.experts.*": {}}})
    assert found is not None and not found.is_int4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method in quantization_config must be a word, not None"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' in quantization_config is not supported; take"),
        ({"quant_method": "gguf"}, "'gguf' in quantization_config is not supported; take the safetensors"),
        ({"quant_method": "hqq"}, r"'hqq' in quantization_config is not known; take .*\(awq, compressed-tensors"),
        ({"load_in_4bit": True}, "'bitsandbytes' in quantization_config is not supported; take"),
        ({"quant_method": "gptq", "bits": True}, "bits in quantization_config is True; 4 and 8 can be read"),
        ({"quant_method": "gptq", "bits": 3}, "bits in quantization_config is 3; 4 and 8 can be read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version in quantization_config is 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"two sizes such as \[128, 128\], not \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [True, True]}, r"two sizes .*, not \[True, True\]"),
        ({"quant_method": "modelopt"}, "quant_algo in quantization_config must be a word, not None"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo in quantization_config is 'W4A8_AWQ'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format in quantization_config is 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "lacks config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "config_groups.a .*lacks weights"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 2}}}},
            "config_groups.a.weights.num_bits is 2; 4 and 8",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": "2:4"},
            "sparsity_config in quantization_config must be an object, not '2:4'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format in quantization_config is 'sparse-24-bitmask'",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_read_is_one_sentence_with_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(config)
