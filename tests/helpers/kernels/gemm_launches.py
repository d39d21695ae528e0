"""What a layer's GEMMs would launch on a GPU that is not here: tensors are `meta`, and kernels write their names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from saccade.kernels.gemm import (
    fp8_linear,
    hopper_act,
    hopper_fp8_split_k,
    hopper_int4_split_k,
    hopper_split_k,
    int4_linear,
    skinny,
)
from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.launch import device, pdl
from saccade.kernels.launch.device import Gpu
from saccade.kernels.launch.kernel_choice import KernelChoice
from saccade.kernels.ops import norm, quantize_rows, unpack_int4
from saccade.kernels.ops.quantize_rows import Fp8Rows
from saccade.models.cuda import moe
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.cuda.residual import Residual
from saccade.models.layers.decoder import Decoder

META = torch.device("meta")


def _rows(x: Any) -> int:
    return x.rows if isinstance(x, Fp8Rows) else len(x)


def _empty(rows: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, outputs, dtype=dtype, device=META)


def _fp8(rows: int, columns: int) -> Fp8Rows:
    return Fp8Rows(_empty(rows, columns, torch.float8_e4m3fn), _empty(columns // 128, rows, torch.float32), rows)


def _linear(x: Any, weight: Tensor, out: Tensor | None = None, **_: Any) -> Tensor:
    return _empty(_rows(x), len(weight), getattr(x, "dtype", torch.bfloat16)) if out is None else out


def _gated(x: Tensor, gate_up_weight: Tensor, **_: Any) -> Tensor:
    return _empty(len(x), len(gate_up_weight) // 2, x.dtype)


def _int4(x: Tensor, packed: Int4Weight, gated: bool = False, out: Tensor | None = None, **_: Any) -> Tensor:
    return _empty(len(x), len(packed.weight) // (2 if gated else 1), x.dtype) if out is None else out


def _parts(x: Any, weight: Tensor, config: Any, **_: Any) -> Tensor:
    return torch.empty(config.splits, _rows(x), len(weight), device=META)


def _act(x: Tensor, weight: Tensor, act: str, out: Tensor | None, **_: Any) -> Tensor:
    return _empty(len(x), len(weight) // 2, x.dtype) if out is None else out


def _unpacked(out: Tensor, **_: Any) -> Tensor:
    return out


_STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    skinny.skinny_linear: _linear,
    skinny.norm_linear: _linear,
    skinny.gated_linear: _gated,
    skinny.norm_gated_linear: _gated,
    skinny.library_linear: _linear,
    fp8_linear.fp8_linear: _linear,
    int4_linear.int4_linear: _int4,
    unpack_int4.unpack_int4: _unpacked,
    unpack_int4.unpack_without_kernel: _unpacked,
    hopper_act.hopper_linear_act: _act,
    hopper_split_k.split_k_linear: _parts,
    hopper_split_k.split_k_gated_linear: _gated,
    hopper_fp8_split_k.fp8_split_k_linear: _parts,
    hopper_fp8_split_k.fp8_linear_into: _linear,
    hopper_fp8_split_k.fp8_split_k_gated_linear: lambda x, gate_up_weight, **_: _fp8(x.rows, len(gate_up_weight) // 2),
    hopper_int4_split_k.int4_split_k_linear: lambda x, packed, config, **_: _parts(x, packed.weight, config),
    hopper_int4_split_k.int4_linear_into: _int4,
    hopper_int4_split_k.int4_split_k_gated_linear: lambda x, packed, **_: _int4(x, packed, gated=True),
    norm.rms_norm: lambda x, **_: x,
    norm.add_rms_norm: lambda x, residual, **_: (residual, residual),
    norm.norm_fp8: lambda x, residual, **_: (_fp8(*residual.shape), residual),
    norm.silu_and_mul: lambda gate_up, **_: gate_up[:, : gate_up.shape[1] // 2],
    norm.silu_and_mul_fp8: lambda gate_up: _fp8(len(gate_up), gate_up.shape[1] // 2),
    quantize_rows.quantize_rows: lambda x, **_: _fp8(*x.shape),
    moe.run_moe: lambda x, **_: x,
}


@contextmanager
def launches(gpu: Gpu) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Names and arguments of what is launched. On such a GPU every self-test passes."""
    import_module("saccade.models.cuda.split_k_table")  # so that its kernels are replaced, too
    noted: list[tuple[str, dict[str, Any]]] = []

    def note(function: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def run(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            noted.append((function.__name__, dict(bound.arguments)))
            bound.apply_defaults()
            return stand_in(**bound.arguments)

        return run

    prefixes = ("saccade.models.cuda", "saccade.kernels.gemm.hopper")
    modules = [module for name, module in sys.modules.items() if name.startswith(prefixes)]
    with ExitStack() as patched:
        for module in (device, pdl, fp8_linear):
            patched.enter_context(patch.object(module, "gpu_of", lambda _: gpu))
        patched.enter_context(patch.object(KernelChoice, "__call__", lambda choice, *case: choice.supports(*case)))
        for module in modules:
            for name, member in list(vars(module).items()):
                if inspect.isfunction(member) and member in _STAND_INS:
                    patched.enter_context(patch.object(module, name, note(member, _STAND_INS[member])))
        yield noted


def run_layers(decoder: Decoder, rows: int, *, in_parts: bool = False) -> None:
    """All GEMMs of each kind of layer."""
    layers = {(type(layer.attention), type(layer.mlp)): layer for layer in decoder.layers}
    gemms = DecoderGemms(decoder).for_rows(rows, in_parts=in_parts)
    x = Residual(_empty(rows, decoder.hidden_size, decoder.table.dtype))
    for layer in layers.values():
        attention = layer.attention
        gates = getattr(attention, "gates", None)
        first = next(getattr(attention, name) for name in ("qkv", "inputs", "q") if hasattr(attention, name))
        _, x = gemms.project(x, layer.attention_norm, first, gates, in_parts=gates is None)
        x = gemms.add(_empty(rows, attention.out.inputs, decoder.table.dtype), attention.out, x)
        x = gemms.mlp(x, layer.mlp_norm, layer.mlp)
    gemms.logits(x, decoder, _empty(rows, len(decoder.head), decoder.table.dtype))
