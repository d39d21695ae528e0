"""The GEMMs of a decoder's layers on a CUDA device, with norms, gates and residuals. Knows no attention.

    rows                                     GEMMs            norm, gate, residual
    2 to 128 on Hopper GPUs (32 if weights   `SplitKGemms`    gate fused; the norm adds residual and partials
    have more than 32 Mi elements, 64 if
    they are quantised); 1 as `_splits_one`
    1, or 2 to 16 with such small weights    `SkinnyGemms`    all fused: four launches per layer; experts take
    (2 to 4 with experts)                                     normed rows and add the residual
    others                                   `LargeGemms`     the norm adds the residual; gate fused where
                                                              `skinny` or `linear_act` has a kernel

Layers in float8 (`Linear.scales`) take kernels that read it: split-K for up to 64 rows on Hopper GPUs,
`skinny` for as many on others, cuBLAS beyond. Split-K and cuBLAS take x in float8 as well; norm and gate
write it where they can. Layers in INT4 (`Linear.groups`) take kernels that read them up to 64 rows, split-K
or `int4_linear`, and beyond are unpacked into scratch memory for a GEMM like any other.

The choice depends on shapes alone, so it is made once for each CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from saccade.kernels.gemm.fp8_linear import fp8_gemm
from saccade.kernels.gemm.skinny import (
    MAX_ELEMENTS,
    MAX_NORMED_ROWS,
    MAX_ROWS,
    MAX_SCALED_ROWS,
    SplitWorkspace,
)
from saccade.kernels.moe.experts_gemv import MAX_TOKENS as MAX_VECTOR_TOKENS
from saccade.models.cuda.int4_gemms import all_packed, decide_int4, elements_of, is_packed, unpacked_elements
from saccade.models.cuda.large_gemms import LargeGemms
from saccade.models.cuda.linear_kinds import both, gated_config, scales_of, widths
from saccade.models.cuda.moe import runs_in_one
from saccade.models.cuda.residual import Gemms
from saccade.models.cuda.skinny_gemms import SkinnyGemms
from saccade.models.cuda.split_k import can_split_k, can_split_k_fp8, can_split_k_int4
from saccade.models.cuda.split_k_gemms import SplitKGemms
from saccade.models.layers.cross_attention import CrossAttention
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.linear import Linear
from saccade.models.layers.mla import LatentAttention
from saccade.models.layers.mlp import GatedMLP
from saccade.models.layers.moe import MoE

_MIN_INT4_WIDTH = 4096  # of a layer: one row of narrower ones was not measured, or is slower by split-K
_MIN_WORKSPACE_ROWS = 512  # from here on memory counts; decode has fewer


def gemms_for(decoder: Decoder, rows: int, workspace: SplitWorkspace, *, in_parts: bool = False) -> Gemms:
    """`in_parts`: attention accepts queries, keys and values as split-K partials."""
    together = list(_wide_linears(decoder))
    wide = [linear for group in together for linear in group]
    is_quantized = _decide_kernels(decoder, wide)
    largest = 0 if is_quantized and rows <= MAX_SCALED_ROWS else max(elements_of(linear) for linear in wide)
    if _splits_k(rows, largest, decoder.table.device) or (rows == 1 and _splits_one(decoder)):
        return SplitKGemms(workspace, in_parts)
    if rows <= MAX_NORMED_ROWS and all(_is_skinny(layer.mlp, rows) for layer in decoder.layers):
        return SkinnyGemms(workspace)
    widest = max(sum(widths(group)) for group in together)
    return LargeGemms(workspace, _new_scratch(decoder.table, rows, widest))


def _decide_kernels(decoder: Decoder, wide: Sequence[Linear]) -> bool:
    """Those of quantised weights, before a CUDA graph is captured; whether split-K reads some of these."""
    device, dtype = decoder.table.device, decoder.table.dtype
    is_scaled = any(scales_of(linear) is not None for linear in wide)
    if is_scaled:
        for in_blocks in (False, True):
            fp8_gemm(device, in_blocks)
        can_split_k_fp8(device)
    reads_int4 = decide_int4(decoder) and can_split_k_int4(device, dtype)
    return is_scaled or (reads_int4 and any(map(is_packed, wide)))


def _is_skinny(mlp: GatedMLP | MoE, rows: int) -> bool:
    """Whether `SkinnyGemms` runs it well."""
    if isinstance(mlp, MoE):
        return rows <= MAX_VECTOR_TOKENS and runs_in_one(mlp)
    return gated_config(mlp, rows) is not None


def gated(rows: Tensor, mlp: GatedMLP, workspace: SplitWorkspace) -> Tensor:
    """silu(gate) * up: [T, wide], for layers that are not a decoder's of ours."""
    if _splits_k(len(rows), elements_of(mlp.gate_up), rows.device):
        return SplitKGemms(workspace, in_parts=False)._gated(rows, mlp)
    return LargeGemms(workspace, None)._gated(rows, mlp)


def _splits_k(rows: int, largest: int, device: torch.device) -> bool:
    """cuBLAS reuses what it reads better over many rows; that counts where weights are large."""
    return 1 < rows <= (128 if largest <= MAX_ELEMENTS else 32) and can_split_k(device)


def _splits_one(decoder: Decoder) -> bool:
    """One row, too, gains by split-K if MMAs read all weights in float8, with x in it as well.

    INT4 gains in wide layers; with experts it does not, and delta nets were not measured.
    """
    table = decoder.table
    dense = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, GatedMLP)]
    linears = [linear for mlp in dense for linear in (mlp.gate_up, mlp.down)]
    linears += [group[0] for group in _wide_linears(decoder)]
    if all(scales_of(linear) is not None for linear in linears):
        return table.dtype == torch.bfloat16 and can_split_k(table.device) and can_split_k_fp8(table.device)
    has_nets = any(isinstance(layer.attention, GatedDeltaNet) for layer in decoder.layers)
    if has_nets or len(dense) < len(decoder.layers) or decoder.hidden_size < _MIN_INT4_WIDTH:
        return False
    return all_packed(decoder) and can_split_k(table.device) and can_split_k_int4(table.device, table.dtype)


def _wide_linears(decoder: Decoder) -> Iterator[list[Linear]]:
    """The first GEMM of every attention, with one beside it, and of every MLP without experts."""
    for layer in decoder.layers:
        own = layer.attention
        if isinstance(own, GatedDeltaNet):
            yield both(own.inputs, own.gates)
        elif isinstance(own, LatentAttention):
            yield [own.inputs]
        else:
            yield [own.q if isinstance(own, CrossAttention) else own.qkv]
        if isinstance(layer.mlp, GatedMLP):
            yield [layer.mlp.gate_up]


def new_workspace(decoder: Decoder) -> SplitWorkspace:
    """Enough for all GEMMs of one CUDA stream."""
    workspace = SplitWorkspace.allocate(MAX_ROWS, decoder.table.device)
    elements = unpacked_elements(decoder)
    return workspace._replace(unpacked=decoder.table.new_empty(elements)) if elements else workspace


def _new_scratch(table: Tensor, rows: int, widest: int) -> Tensor | None:
    """One allocation for the widest results of all layers: freed, it would be split for narrower ones."""
    return None if rows < _MIN_WORKSPACE_ROWS else table.new_empty(rows * widest)
