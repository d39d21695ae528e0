"""Quantises a checkpoint in the layouts in which they are published, rounding to the nearest.

Formats that end in -mse also clip the largest numbers of a group where that lowers its squared error.

    python -m tests.helpers.families.quantize saccade/builtin /tmp/quantised gptq

Each packer returns the tensors to store and the weight they stand for, by arithmetic of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]  # suffix -> tensor, and the weight they stand for
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PROJECTIONS = ("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")  # a delta net's gates stay as they are
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each place of a word
CLIPS = tuple(1 - step / 32 for step in range(13))  # shares of a group's range that are tried


def to_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def fp8_blocks(weight: Tensor, block: int = 128, name: str = "weight_scale_inv") -> Packed:
    scale = torch.empty(-(-weight.shape[0] // block), -(-weight.shape[1] // block))
    stored = torch.empty(weight.shape, dtype=FP8)
    meant = torch.empty(weight.shape)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scale[row, column] = weight[part].abs().max().clamp(min=1e-12) / FP8_MAX
            stored[part] = to_fp8(weight[part], scale[row, column])
            meant[part] = stored[part].float() * scale[row, column]
    return {"weight": stored, name: scale}, meant


def fp8_rows(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    stored = to_fp8(weight, scale)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / FP8_MAX
    stored = to_fp8(weight, scale)
    beside = {"weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return {"weight": stored, **beside}, stored.float() * scale


def int8_rows(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


class Grouped(NamedTuple):
    """Unsigned numbers [out, in] with a scale and a zero point for each group of inputs."""

    values: Tensor
    scale: Tensor  # [out, groups]
    zeros: Tensor
    group_of: Tensor  # of each input
    meant: Tensor


def grouped(
    weight: Tensor, size: int, bits: int, *, symmetric: bool, shuffled: bool = False, mse: bool = False
) -> Grouped:
    inputs = weight.shape[1]
    group_of = torch.arange(inputs) // size
    if shuffled:  # as `desc_act` does, by importance
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    groups, top = int(group_of.max()) + 1, 2**bits - 1
    scale, zeros = torch.empty(len(weight), groups), torch.empty(len(weight), groups)
    for group in range(groups):
        part = weight[:, group_of == group]
        found = [_range(part, bits, symmetric, clip) for clip in (CLIPS if mse else (1.0,))]
        errors = torch.stack([((_rounded(part, *one, top) - part) ** 2).sum(1) for one in found])
        best = errors.argmin(0, keepdim=True)
        scale[:, group], zeros[:, group] = (torch.stack(kind).gather(0, best)[0] for kind in zip(*found, strict=True))
    wide, offset = scale[:, group_of], zeros[:, group_of]
    values = ((weight / wide).round() + offset).clamp(0, top)
    return Grouped(values.int(), scale, zeros.int(), group_of, (values - offset) * wide)


def _range(part: Tensor, bits: int, symmetric: bool, clip: float) -> tuple[Tensor, Tensor]:
    """The scale and zero point of each row that covers this share of its range."""
    top = 2**bits - 1
    low, high = part.amin(1).clamp(max=0) * clip, part.amax(1).clamp(min=0) * clip
    if symmetric:
        high = part.abs().amax(1) * clip
        low = -high
    scale = ((high - low) / top).clamp(min=1e-8).half().float()
    middle = torch.full_like(scale, 2 ** (bits - 1))
    return scale, middle if symmetric else (-low / scale).round().clamp(1, top)


def _rounded(part: Tensor, scale: Tensor, zeros: Tensor, top: int) -> Tensor:
    values = ((part / scale[:, None]).round() + zeros[:, None]).clamp(0, top)
    return (values - zeros[:, None]) * scale[:, None]


def pack(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Into words of 32 bits along `dim`; what is missing in the last word is zero."""
    count = 32 // bits
    rows = values.movedim(dim, -1).to(torch.int64)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % count))
    words = torch.zeros(*rows.shape[:-1], rows.shape[-1] // count, dtype=torch.int64)
    for place, column in enumerate(order or range(count)):
        words |= rows[..., column::count] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def gptq(weight: Tensor, size: int = 128, bits: int = 4, offset: int = 1, **how: bool) -> Packed:
    found = grouped(weight, size, bits, symmetric=False, **how)
    stored = {
        "qweight": pack(found.values.T, bits, 0),
        "qzeros": pack(found.zeros.T - offset, bits, 1),
        "scales": found.scale.T.contiguous().half(),
        "g_idx": found.group_of.int(),
    }
    return stored, found.meant


def awq(weight: Tensor, size: int = 128) -> Packed:
    found = grouped(weight, size, 4, symmetric=False)
    stored = {
        "qweight": pack(found.values.T, 4, 1, AWQ_COLUMNS),
        "qzeros": pack(found.zeros.T, 4, 1, AWQ_COLUMNS),
        "scales": found.scale.T.contiguous().half(),
    }
    return stored, found.meant


def packed_ints(
    weight: Tensor,
    size: int = 128,
    bits: int = 4,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
    mse: bool = False,
) -> Packed:
    found = grouped(weight, size, bits, symmetric=symmetric, shuffled=shuffled, mse=mse)
    stored = {
        "weight_packed": pack(found.values, bits, 1),
        "weight_scale": found.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack(found.zeros, bits, 0)
    if shuffled:
        stored["weight_g_idx"] = found.group_of.int()
    return stored, found.meant


def to_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the nearest numbers, two a byte, and the numbers."""
    code = (weight.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    numbers = FP4[code] * weight.sign()
    code = (code + 8 * (weight < 0)).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), numbers


def nvfp4(weight: Tensor, *, is_modelopt: bool) -> Packed:
    parts = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * FP8_MAX)
    scale = (parts.abs().amax(-1) / 6 / whole).clamp(min=2**-6).to(FP8)
    wide = (scale.float() * whole).unsqueeze(-1)
    packed, numbers = to_fp4((parts / wide).flatten(1))
    meant = (numbers.unflatten(1, (-1, 16)) * wide).flatten(1)
    if is_modelopt:
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}, meant
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": (1 / whole).view(1)}, meant


def mxfp4(weight: Tensor) -> Packed:
    parts = weight.unflatten(1, (-1, 32))
    power = (parts.abs().amax(-1).clamp(min=1e-30) / 6).log2().ceil()
    packed, numbers = to_fp4((parts / power.exp2().unsqueeze(-1)).flatten(1))
    meant = (numbers.unflatten(1, (-1, 32)) * power.exp2().unsqueeze(-1)).flatten(1)
    return {"weight_packed": packed, "weight_scale": (power + 127).to(torch.uint8)}, meant


class Format(NamedTuple):
    pack: Callable[[Tensor], Packed]
    config: Mapping[str, Any]
    multiple: int = 1  # of the inputs that can be packed


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def grouped_config(method: str, size: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": size, **fields}


def packed_format(size: int, **how: Any) -> Format:
    return Format(lambda w: packed_ints(w, size, **how), compressed("pack-quantized", group_size=size), size)


FORMATS: Mapping[str, Format] = {
    "fp8-blocks": Format(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8-tensor": Format(fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": Format(fp8_rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt-fp8": Format(fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-nvfp4": Format(
        lambda w: nvfp4(w, is_modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 16
    ),
    "compressed-fp8": Format(fp8_rows, compressed("float-quantized", num_bits=8, type="float")),
    "compressed-fp8-blocks": Format(
        lambda w: fp8_blocks(w, 32, "weight_scale"),
        compressed("float-quantized", num_bits=8, type="float", block_structure=[32, 32]),
    ),
    "compressed-int8": Format(int8_rows, compressed("int-quantized", num_bits=8)),
    "compressed-w4-32": packed_format(32),
    "compressed-w4-64": packed_format(64),
    "compressed-w4-128": packed_format(128),
    "compressed-w4-128-mse": packed_format(128, mse=True),
    "compressed-w4-zeros": packed_format(32, symmetric=False),
    "compressed-w4-order": packed_format(32, shuffled=True),
    "compressed-w8": packed_format(64, bits=8),
    "compressed-nvfp4": Format(lambda w: nvfp4(w, is_modelopt=False), compressed("nvfp4-pack-quantized"), 16),
    "compressed-mxfp4": Format(mxfp4, compressed("mxfp4-pack-quantized"), 32),
    "awq": Format(awq, grouped_config("awq", 128, zero_point=True, version="gemm"), 128),
    "awq-32": Format(lambda w: awq(w, 32), grouped_config("awq", 32, version="gemm"), 32),
    "gptq": Format(gptq, grouped_config("gptq", 128, desc_act=False), 128),
    "gptq-mse": Format(lambda w: gptq(w, mse=True), grouped_config("gptq", 128, desc_act=False), 128),
    "gptq-order": Format(lambda w: gptq(w, 32, shuffled=True), grouped_config("gptq", 32, desc_act=True), 32),
    "gptq-v2": Format(lambda w: gptq(w, 64, offset=0), grouped_config("gptq", 64, checkpoint_format="gptq_v2"), 64),
    "gptq-8": Format(lambda w: gptq(w, 32, 8), {"quant_method": "gptq", "bits": 8, "group_size": 32}, 32),
}


def is_linear(name: str, weight: Tensor) -> bool:
    """What quantisers take: projections of the decoder. Towers, embeddings and heads stay as they are."""
    is_projection = name.endswith(PROJECTIONS) and weight.dim() == 2
    return is_projection and not any(part in name for part in ("visual", "vision", "patch_embed"))


def quantize(source: Path, target: Path, name: str) -> dict[str, Tensor]:
    """Write `source` quantised to `target`. Returns the weights that the quantised ones stand for."""
    chosen = FORMATS[name]
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": chosen.config}))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for weight_name, weight in load_file(file).items():
            if is_linear(weight_name, weight) and weight.shape[1] % chosen.multiple == 0:
                parts, meant[weight_name] = chosen.pack(weight.float())
                stored |= {weight_name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
            else:
                stored[weight_name] = weight
    save_file(stored, target / "model.safetensors")
    return meant


if __name__ == "__main__":
    count = len(quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
    print(f"{count} weights as {sys.argv[3]}")
