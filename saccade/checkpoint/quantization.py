"""How a checkpoint's weights are quantised, by its config. What cannot be read is refused in one sentence.

It is `quantization_config` in config.json or, from ModelOpt, the file hf_quant_config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.checkpoint.files import read_optional
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError, is_int_within, is_list_of, is_text

BLOCK = (128, 128)
_BITS = (4, 8)
_INSTEAD = {
    "bitsandbytes": "take the checkpoint in bfloat16, or one in FP8, AWQ or GPTQ",
    "gguf": "take the safetensors checkpoint that it was made from, or one in FP8, AWQ or GPTQ",
}
_COMPRESSED = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_MODELOPT = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP4", "NVFP4", "NVFP4_AWQ")
_EXPERTS = re.compile(r"(?<!shared_)experts|layers\.\d+(\.mlp)?\.?$")
_FP8_SUMMARIES = ("FP8", "compressed-tensors (float-quantized)")


def stays_fp8(rows: Iterable[int], inputs: int, *, in_blocks: bool) -> bool:
    """Whether one GEMM over parts of so many rows can be in FP8. Kernels read 128 columns at once."""
    multiple = BLOCK[0] if in_blocks else 1
    return inputs % BLOCK[1] == 0 and all(size % multiple == 0 for size in rows)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the quantised weights of a checkpoint are stored."""

    method: str
    summary: str  # for people
    block: tuple[int, int] = BLOCK  # of weights with a scale for each block
    has_blocks: bool = False  # whether there are such, by the config
    bits: int = 4  # of AWQ and GPTQ
    zero_point_offset: int = 0  # what GPTQ's first format took off its zero points
    group: int = 0  # columns with one scale, of whole numbers in groups; 0: not known
    has_zeros: bool = True  # whether groups have zero points
    has_order: bool = False  # whether groups are of inputs in another order (desc_act), by the config

    @property
    def becomes_fp8(self) -> bool:
        """Whether a GPU that multiplies FP8 has the weights so: they are stored in FP8 or in FP4."""
        return self.is_fp8 or "FP4" in self.summary.upper()

    @property
    def is_fp8(self) -> bool:
        """Whether weights can stay so, by the config; what a file holds is seen when it is read."""
        if self.block != BLOCK:
            return False
        return self.method in ("fp8", "fbgemm_fp8") or self.summary.startswith(_FP8_SUMMARIES)

    @property
    def is_int4(self) -> bool:
        """Whether weights can stay so, by the config, as with `is_fp8`."""
        return self.bits == 4 and self.group in (32, 64, 128)

    @property
    def int4_bytes(self) -> float:
        """Bytes of a weight in INT4, with its part of a scale (16 bits) and a zero point (8 bits)."""
        return 0.5 + (3 if self.has_zeros else 2) / self.group if self.is_int4 else 0.0


def quantization_of(raw: Mapping[str, Any], folder: Path) -> Quantization | None:
    """None: the weights are not quantised. ConfigError names the field that cannot be read."""
    config = raw.get("quantization_config")
    if config is None:
        config = setting(raw, "text_config", {}).get("quantization_config")
    if config is None:
        config = _of_modelopt_file(folder)
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {config!r}")
    if any(config.get(name) for name in ("load_in_4bit", "load_in_8bit")):
        config = {"quant_method": "bitsandbytes", **config}  # files of its first versions do not name it
    method = _word(config, "quant_method")
    if method in _INSTEAD:
        raise ConfigError(
            f"quant_method {method!r} in quantization_config is not supported; {_INSTEAD[method]}"
        )
    if method not in _READERS:
        methods = ", ".join(sorted(_READERS))
        problem = f"is not known; take the checkpoint in bfloat16, or one in a known one ({methods})"
        raise ConfigError(f"quant_method {method!r} in quantization_config {problem}")
    quantization = _READERS[method](config)
    if quantization is None or not quantization.is_int4 or not _leaves_out_experts(config):
        return quantization
    return replace(quantization, group=0)  # memory is planned as if all were dequantised


def _leaves_out_experts(config: Mapping[str, Any]) -> bool:
    """Whether the file's own lists name routed experts, or a layer as a whole."""
    lists = [config.get(name) for name in ("ignore", "modules_to_not_convert", "dynamic")]
    modules = [name for names in lists if isinstance(names, Mapping | Sequence) for name in names]
    return any(_EXPERTS.search(str(name)) for name in modules)


def _of_modelopt_file(folder: Path) -> Mapping[str, Any] | None:
    settings = read_optional(folder / "hf_quant_config.json").get("quantization")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"quantization in hf_quant_config.json must be an object, not {settings!r}")
    return {**settings, "quant_method": "modelopt"}


# --- by method ----------------------------------------------------------------------------------------------


def _fp8(config: Mapping[str, Any]) -> Quantization:
    if config.get("weight_block_size") is None:
        return Quantization("fp8", "FP8")
    block = _block(config, "weight_block_size")
    return Quantization("fp8", f"FP8 in blocks of {block[0]}x{block[1]}", block, has_blocks=True)


def _fbgemm(config: Mapping[str, Any]) -> Quantization:
    return Quantization("fbgemm_fp8", "FP8 with a scale for each row")


def _modelopt(config: Mapping[str, Any]) -> Quantization | None:
    """An algorithm of null: only the KV cache was quantised, or nothing."""
    if config.get("quant_algo", "") is None:
        return None
    algorithm = _word(config, "quant_algo").upper()
    _check_among("quant_algo", algorithm, _MODELOPT)
    return Quantization("modelopt", algorithm)


def _awq(config: Mapping[str, Any]) -> Quantization:
    _check_bits(config, (4,))
    version = str(config.get("version", "gemm")).lower()
    _check_among("version", version, ("gemm",))
    return Quantization("awq", "AWQ in 4 bits", group=_group(config))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    bits = _check_bits(config, _BITS)
    version = setting(config, "checkpoint_format", "gptq")
    _check_among("checkpoint_format", version, ("gptq", "gptq_v2"))
    offset = int(version == "gptq")
    summary = f"GPTQ in {bits} bits"
    return Quantization(
        "gptq",
        summary,
        bits=bits,
        zero_point_offset=offset,
        group=_group(config),
        has_order=config.get("desc_act") is True,
    )


def _compressed(config: Mapping[str, Any]) -> Quantization:
    layout = setting(config, "format", "dense")
    _check_among("format", layout, _COMPRESSED)
    sparsity = setting(config, "sparsity_config", {})
    if not isinstance(sparsity, Mapping):
        raise ConfigError(f"sparsity_config in quantization_config must be an object, not {sparsity!r}")
    _check_among("sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("quantization_config lacks config_groups, so its layers cannot be read")
    blocks = {_group_block(name, group) for name, group in groups.items()} - {None}
    if len(blocks) > 1:
        raise ConfigError(
            f"the config_groups of quantization_config have several block sizes: {sorted(blocks)}"
        )
    summary = f"compressed-tensors ({layout})"
    first = next(iter(groups.values()))["weights"]
    sizes = {(group["weights"]["num_bits"], group["weights"].get("group_size")) for group in groups.values()}
    is_packed = layout == "pack-quantized" and len(sizes) == 1
    return Quantization(
        "compressed-tensors",
        summary,
        next(iter(blocks), BLOCK),
        bool(blocks),
        bits=first["num_bits"],
        group=_group(first) if is_packed else 0,
        has_zeros=first.get("symmetric") is False,
        has_order=first.get("actorder") in (True, "group", "dynamic"),
    )


def _group_block(name: str, group: Any) -> Any:
    match group:
        case {"weights": Mapping() as weights}:
            bits = weights.get("num_bits")
        case _:
            raise ConfigError(f"config_groups.{name} of quantization_config lacks weights")
    if bits not in _BITS:
        raise ConfigError(f"config_groups.{name}.weights.num_bits is {bits!r}; 4 and 8 can be read")
    return _block(weights, "block_structure") if weights.get("block_structure") else None


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Quantization | None]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}

# --- fields -------------------------------------------------------------------------------------------------


def _word(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if not is_text(value):
        raise ConfigError(f"{name} in quantization_config must be a word, not {value!r}")
    return value


def _check_among(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} in quantization_config is {value!r}; known are {', '.join(choices)}")


def _check_bits(config: Mapping[str, Any], widths: Sequence[int]) -> int:
    bits = config.get("bits", config.get("w_bit"))
    if type(bits) is not int or bits not in widths:
        names = " and ".join(map(str, widths))
        raise ConfigError(f"bits in quantization_config is {bits!r}; {names} can be read")
    return int(bits)


def _group(config: Mapping[str, Any]) -> int:
    """0: whole rows, or another size than whole numbers of columns."""
    size = config.get("group_size", config.get("q_group_size"))
    return max(0, size) if isinstance(size, int) else 0


def _block(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    value = config.get(name)
    if is_list_of(value, object, 2, 2) and all(is_int_within(n, 1) for n in value):
        return value[0], value[1]
    raise ConfigError(f"{name} in quantization_config must be two sizes such as [128, 128], not {value!r}")
