"""The GEMMs of a decoder's layers on a CUDA device, with norms, gates and residuals. Knows no attention.

    rows                                     GEMMs            norm, gate, residual
    2 to 128 on Hopper GPUs (32 if weights   `_SplitKGemms`   gate fused; the norm adds residual and partials
    have more than 32 Mi elements); 1 if
    layers are in float8
    1, or 2 to 16 with such small weights    `_SkinnyGemms`   all fused: four launches per layer; experts take
    (2 to 4 with experts)                                     normed rows and add the residual
    others                                   `_LargeGemms`    the norm adds the residual; gate fused where
                                                              `skinny` or `linear_act` has a kernel

Layers in float8 (`Linear.scales`) take kernels that read it: split-K for up to 64 rows on Hopper GPUs,
`skinny` for as many on others, cuBLAS beyond. Split-K and cuBLAS take x in float8 as well; norm and gate
write it where they can. Layers in INT4 (`Linear.groups`) do so up to 64 rows, and beyond are unpacked into
scratch memory for a GEMM like any other.

The choice depends on shapes alone, so it is made once for each CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.kernels.gemm.fp8_linear import fp8_gemm, fp8_linear, has_fp8_gemm
from saccade.kernels.gemm.int4_linear import choose_int4
from saccade.kernels.gemm.linear_act import linear_act
from saccade.kernels.gemm.skinny import (
    MAX_ELEMENTS,
    MAX_NORMED_ROWS,
    MAX_ROWS,
    MAX_SCALED_ROWS,
    Config,
    SplitWorkspace,
    choose,
    gated_linear,
    norm_gated_linear,
    norm_linear,
    skinny_linear,
)
from saccade.kernels.moe.experts_gemv import MAX_TOKENS as MAX_VECTOR_TOKENS
from saccade.kernels.ops.norm import add_rms_norm, norm_fp8, rms_norm, silu_and_mul, silu_and_mul_fp8
from saccade.kernels.ops.quantize_rows import Fp8Rows, quantize_rows
from saccade.kernels.ops.scaled_weight import BLOCK, block_of
from saccade.models.cuda.int4_gemms import (
    decide_int4,
    elements_of,
    in_order,
    is_packed,
    packed_linear,
    reads_packed,
    unpacked,
    unpacked_elements,
)
from saccade.models.cuda.moe import run_moe, runs_in_one
from saccade.models.cuda.split_k import can_split_k, can_split_k_fp8
from saccade.models.layers.cross_attention import CrossAttention
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.mla import LatentAttention
from saccade.models.layers.mlp import GatedMLP
from saccade.models.layers.moe import MoE

_MIN_WORKSPACE_ROWS = 512  # from here on memory counts; decode has fewer


class Residual(NamedTuple):
    """The residual between two GEMMs."""

    rows: Tensor  # [T, H]
    added: Tensor | None = None  # [T, H] or split-K partials [splits, T, H]: to be added by the next norm


class Gemms(Protocol):
    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        """The projection [T, outputs] of the normed residual, and the residual.

        The outputs of `beside` follow those of `linear` in each row. With `in_parts`, here and in
        `gemms_for`, it may be split-K partials [splits, T, outputs].
        """
        ...

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        """The residual with the projection of `rows` added."""
        ...

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        """The residual with the MLP's result added; `scales`, [T, 1], multiply its rows."""
        ...

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        """The input of the LM head: [T, H], or of the rows `only` (int32 [W]): [W, H]."""
        ...

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        """[T, vocabulary], in the model's dtype: rounding does not change which one is largest."""
        ...


def gemms_for(decoder: Decoder, rows: int, workspace: SplitWorkspace, *, in_parts: bool = False) -> Gemms:
    """`in_parts`: attention accepts queries, keys and values as split-K partials."""
    together = list(_wide_linears(decoder))
    wide = [linear for group in together for linear in group]
    is_scaled = any(_scales(linear) is not None for linear in wide)
    if is_scaled:
        _decide_fp8_gemms(decoder.table.device)
    decide_int4(decoder)
    largest = 0 if is_scaled and rows <= MAX_SCALED_ROWS else max(elements_of(linear) for linear in wide)
    if _splits_k(rows, largest, decoder.table.device) or (rows == 1 and _splits_one(decoder)):
        return _SplitKGemms(workspace, in_parts)
    if rows <= MAX_NORMED_ROWS and all(_is_skinny(layer.mlp, rows) for layer in decoder.layers):
        return _SkinnyGemms(workspace)
    widest = max(sum(_widths(group)) for group in together)
    return _LargeGemms(workspace, _new_scratch(decoder.table, rows, widest))


def _is_skinny(mlp: GatedMLP | MoE, rows: int) -> bool:
    """Whether `_SkinnyGemms` runs it well."""
    if isinstance(mlp, MoE):
        return rows <= MAX_VECTOR_TOKENS and runs_in_one(mlp)
    return _gated_config(mlp, rows) is not None


def gated(rows: Tensor, mlp: GatedMLP, workspace: SplitWorkspace) -> Tensor:
    """silu(gate) * up: [T, wide], for layers that are not a decoder's of ours."""
    if _splits_k(len(rows), elements_of(mlp.gate_up), rows.device):
        return _SplitKGemms(workspace, in_parts=False)._gated(rows, mlp)
    return _LargeGemms(workspace, None)._gated(rows, mlp)


def _splits_k(rows: int, largest: int, device: torch.device) -> bool:
    """cuBLAS reuses what it reads better over many rows; that counts where weights are large."""
    return 1 < rows <= (128 if largest <= MAX_ELEMENTS else 32) and can_split_k(device)


def _splits_one(decoder: Decoder) -> bool:
    """One row, too, gains by split-K if MMAs read both sides in float8."""
    dense = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, GatedMLP)]
    is_scaled = all(_is_scaled(mlp.gate_up, mlp.down) for mlp in dense)
    is_scaled = is_scaled and all(_is_scaled(group[0]) for group in _wide_linears(decoder))
    device = decoder.table.device
    is_bf16 = decoder.table.dtype == torch.bfloat16
    return is_scaled and is_bf16 and can_split_k(device) and can_split_k_fp8(device)


def _is_scaled(*linears: Linear) -> bool:
    return all(_scales(linear) is not None for linear in linears)


def _wide_linears(decoder: Decoder) -> Iterator[list[Linear]]:
    """The first GEMM of every attention, with one beside it, and of every MLP without experts."""
    for layer in decoder.layers:
        own = layer.attention
        if isinstance(own, GatedDeltaNet):
            yield _both(own.inputs, own.gates)
        elif isinstance(own, LatentAttention):
            yield [own.inputs]
        else:
            yield [own.q if isinstance(own, CrossAttention) else own.qkv]
        if isinstance(layer.mlp, GatedMLP):
            yield [layer.mlp.gate_up]


def _both(linear: Linear, beside: Linear | None) -> list[Linear]:
    return [linear] if beside is None else [linear, beside]


def _widths(linears: Sequence[Linear]) -> list[int]:
    return [len(linear.weight) for linear in linears]


def new_workspace(decoder: Decoder) -> SplitWorkspace:
    """Enough for all GEMMs of one CUDA stream."""
    workspace = SplitWorkspace.allocate(MAX_ROWS, decoder.table.device)
    elements = unpacked_elements(decoder)
    return workspace._replace(unpacked=decoder.table.new_empty(elements)) if elements else workspace


def _new_scratch(table: Tensor, rows: int, widest: int) -> Tensor | None:
    """One allocation for the widest results of all layers: freed, it would be split for narrower ones."""
    return None if rows < _MIN_WORKSPACE_ROWS else table.new_empty(rows * widest)


def _gated_config(mlp: GatedMLP, rows: int) -> Config | None:
    """The config of gate and up in one launch; None where cuBLAS is better, or there is a bias."""
    weight = mlp.gate_up.weight
    if mlp.gate_up.bias is not None:
        return None
    if is_packed(mlp.gate_up):
        return choose_int4(rows, len(weight) // 2, mlp.gate_up.inputs, gated=True)
    scaled = _scales(mlp.gate_up) is not None
    return choose(rows, len(weight) // 2, weight.shape[1], weight.dtype, gated=True, scaled=scaled)


def _scales(linear: Linear) -> Tensor | None:
    """PyTorch's own layers, which `gated` takes too, have none."""
    return getattr(linear, "scales", None)


def _scaled(linear: Linear) -> tuple[Tensor, Tensor]:
    """A weight in float8 and its scales."""
    assert linear.scales is not None
    return linear.weight, linear.scales


def _reads_fp8(rows: Tensor, linear: Linear) -> bool:
    """Whether a kernel multiplies so many rows with its weight in float8."""
    in_blocks = block_of(linear.weight, linear.scales) > 0
    return len(rows) <= MAX_SCALED_ROWS or has_fp8_gemm(linear.weight, rows.dtype, in_blocks=in_blocks)


def _decide_fp8_gemms(device: torch.device) -> None:
    for in_blocks in (False, True):
        fp8_gemm(device, in_blocks)
    can_split_k_fp8(device)


def _is_large(rows: Tensor, linear: Linear) -> bool:
    """Whether it has too many elements for so many rows. Matters where layers in float8 are beside others."""
    limit = MAX_SCALED_ROWS if _scales(linear) is not None else MAX_ROWS
    return elements_of(linear) > MAX_ELEMENTS and len(rows) > limit


def _side_by_side(
    multiply: Callable[[Linear, Tensor | None], Tensor],
    linears: Sequence[Linear],
    rows: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """[T, outputs of all], in `out` if given: each GEMM writes its columns of the rows."""
    if len(linears) == 1:
        return multiply(linears[0], out)
    widths = _widths(linears)
    out = rows.new_empty(len(rows), sum(widths)) if out is None else out
    for linear, part in zip(linears, torch.split(out, widths, dim=1), strict=True):
        multiply(linear, part)
    return out


class _SkinnyGemms:
    def __init__(self, workspace: SplitWorkspace) -> None:
        self.workspace = workspace

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        def multiply(one: Linear, out: Tensor | None) -> Tensor:
            if is_packed(one):
                return packed_linear(x.rows, one, norm=norm, workspace=self.workspace, out=out)
            own = (one.weight, one.bias)
            given = (x.rows, norm.weight, norm.eps, *own)
            return norm_linear(*given, scales=_scales(one), workspace=self.workspace, out=out)

        return _side_by_side(multiply, _both(linear, beside), x.rows), x

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        if is_packed(linear):
            return Residual(packed_linear(rows, linear, x.rows, workspace=self.workspace))
        own = (linear.weight, linear.bias)
        return Residual(skinny_linear(rows, *own, x.rows, scales=_scales(linear), workspace=self.workspace))

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        if isinstance(mlp, MoE):
            return Residual(run_moe(rms_norm(x.rows, norm.weight, norm.eps), mlp, x.rows))
        gate_up = mlp.gate_up
        if is_packed(gate_up):
            gated = packed_linear(x.rows, gate_up, norm=norm, gated=True, workspace=self.workspace)
        else:
            own = (norm.weight, norm.eps, gate_up.weight)
            gated = norm_gated_linear(x.rows, *own, scales=_scales(gate_up))
        return self.add(gated if scales is None else gated.mul_(scales), mlp.down, x)

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return decoder.norm(x.rows if only is None else x.rows.index_select(0, only))

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        norm = decoder.norm
        return norm_linear(x.rows, norm.weight, norm.eps, decoder.head, workspace=self.workspace, out=out)


class _LargeGemms:
    """A result in `scratch` is valid until the next one is written there."""

    def __init__(self, workspace: SplitWorkspace, scratch: Tensor | None) -> None:
        self.workspace = workspace
        self.scratch = scratch

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        linears = _both(linear, beside)
        normed, x = self._norm_for(x, norm, linears)
        return self._projected(normed, linears, x.rows), x

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        return Residual(x.rows, self._added(rows, linear))

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        if isinstance(mlp, MoE):
            assert scales is None, "layers with a gate have no experts"
            normed, x = self._norm(x, norm)
            return Residual(x.rows, run_moe(normed, mlp))
        is_plain = scales is None and mlp.gate_up.bias is None
        rows, x = self._norm_for(x, norm, [mlp.gate_up, mlp.down]) if is_plain else self._norm(x, norm)
        if isinstance(rows, Fp8Rows):
            return Residual(x.rows, self._added(self._gated_fp8(rows, mlp), mlp.down))
        gated = self._gated(rows, mlp)
        return Residual(x.rows, self._added(gated if scales is None else gated.mul_(scales), mlp.down))

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return self._norm(x, decoder.norm, only)[0]

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        return skinny_linear(self.normed(x, decoder), decoder.head, workspace=self.workspace, out=out)

    def _norm(self, x: Residual, norm: RMSNorm, only: Tensor | None = None) -> tuple[Tensor, Residual]:
        if x.added is None:
            return norm(x.rows if only is None else x.rows.index_select(0, only)), x
        normed, rows = add_rms_norm(x.added, x.rows, norm.weight, norm.eps, only)
        return normed, Residual(rows)

    def _norm_for(
        self, x: Residual, norm: RMSNorm, linears: Sequence[Linear]
    ) -> tuple[Tensor | Fp8Rows, Residual]:
        """In float8, if all of these layers read it."""
        if not all(self._takes_fp8(x.rows, linear) for linear in linears):
            return self._norm(x, norm)
        normed, rows = norm_fp8(x.added, x.rows, norm.weight, norm.eps)
        return normed, Residual(rows)

    def _takes_fp8(self, x: Tensor, linear: Linear) -> bool:
        """Whether so many rows are multiplied in float8, with a scale for 128 columns."""
        scales = _scales(linear)
        if scales is None or len(x) <= MAX_SCALED_ROWS or block_of(linear.weight, scales) == 0:
            return False
        return has_fp8_gemm(linear.weight, x.dtype, in_blocks=True)

    def _projected(self, rows: Tensor | Fp8Rows, linears: Sequence[Linear], like: Tensor) -> Tensor:
        out = self._scratch_for(len(like), sum(_widths(linears)))
        return _side_by_side(partial(self._linear, rows), linears, like, out)

    def _linear(self, rows: Tensor | Fp8Rows, linear: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(rows, Fp8Rows):
            return fp8_linear(rows, *_scaled(linear), linear.bias, out)
        if is_packed(linear):
            return packed_linear(rows, linear, workspace=self.workspace, out=out)
        weight, scales = linear.weight, _scales(linear)
        if scales is not None and not _reads_fp8(rows, linear):
            weight, scales = linear.dequantized(rows.dtype), None
        return skinny_linear(rows, weight, linear.bias, scales=scales, workspace=self.workspace, out=out)

    def _scratch_for(self, rows: int, outputs: int) -> Tensor | None:
        return None if self.scratch is None else self.scratch[: rows * outputs].view(rows, outputs)

    def _added(self, rows: Tensor | Fp8Rows, linear: Linear) -> Tensor:
        """What the next norm adds to the residual."""
        return self._linear(rows, linear)

    def _gated_fp8(self, rows: Fp8Rows, mlp: GatedMLP) -> Fp8Rows:
        scratch = self._scratch_for(rows.rows, len(mlp.gate_up.weight))
        return silu_and_mul_fp8(self._linear(rows, mlp.gate_up, scratch))

    def _gated(self, rows: Tensor, mlp: GatedMLP) -> Tensor:
        """silu(gate) * up: [T, wide]."""
        config = _gated_config(mlp, len(rows))
        weight, scales = mlp.gate_up.weight, _scales(mlp.gate_up)
        if is_packed(mlp.gate_up):
            return self._packed_gated(rows, mlp.gate_up, config)
        if config is not None:
            return gated_linear(rows, weight, scales=scales, config=config)
        if scales is None:
            out = self._scratch_for(len(rows), len(weight) // 2)
            found = linear_act(rows, weight, mlp.gate_up.bias, "silu_and_mul", out)
            if found is not None:
                return found
        scratch = self._scratch_for(len(rows), len(weight))
        return silu_and_mul(self._linear(rows, mlp.gate_up, scratch), over_gate=scratch is not None)

    def _packed_gated(self, rows: Tensor, gate_up: Linear, config: Config | None) -> Tensor:
        if config is not None and reads_packed(rows):
            return packed_linear(rows, gate_up, gated=True, workspace=self.workspace, config=config)
        if not reads_packed(rows):
            weight = unpacked(gate_up, self.workspace)
            out = self._scratch_for(len(rows), len(weight) // 2)
            found = linear_act(in_order(rows, gate_up), weight, gate_up.bias, "silu_and_mul", out)
            if found is not None:
                return found
        scratch = self._scratch_for(len(rows), len(gate_up.weight))
        return silu_and_mul(self._linear(rows, gate_up, scratch), over_gate=scratch is not None)


class _SplitKGemms(_LargeGemms):
    def __init__(self, workspace: SplitWorkspace, in_parts: bool) -> None:
        # Gluon is experimental: only where used
        from saccade.kernels.gemm import hopper_fp8_split_k, hopper_split_k

        super().__init__(workspace, None)
        self.in_parts = in_parts
        self._bf16, self._fp8 = hopper_split_k, hopper_fp8_split_k

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        if not (in_parts and self.in_parts):
            normed, x = self._norm(x, norm)
            return self._projected(normed, _both(linear, beside), normed), x
        assert beside is None, "split-K partials of two GEMMs would be two tensors"
        rows, x = self._norm_for(x, norm, [linear])
        return self._added(rows, linear), x

    def _takes_fp8(self, x: Tensor, linear: Linear) -> bool:
        is_scaled = _scales(linear) is not None and x.dtype == torch.bfloat16
        return is_scaled and self._fp8.suits(len(x), *linear.weight.shape) and can_split_k_fp8(x.device)

    def _linear(self, rows: Tensor | Fp8Rows, linear: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(rows, Fp8Rows) or len(rows) == 1 or not self._fp8.fills_device(len(linear.weight)):
            return super()._linear(rows, linear, out)
        if not self._takes_fp8(rows, linear):
            return super()._linear(rows, linear, out)
        out = rows.new_empty(len(rows), len(linear.weight)) if out is None else out
        return self._fp8.fp8_linear_into(quantize_rows(rows, BLOCK), *_scaled(linear), linear.bias, out)

    def _added(self, rows: Tensor | Fp8Rows, linear: Linear) -> Tensor:
        if isinstance(rows, Fp8Rows):
            return self._added_fp8(rows, linear)
        weight = linear.weight
        outputs, inputs = weight.shape
        is_suited = self._bf16.suits(len(rows), outputs, inputs, rows.dtype)
        if is_packed(linear) or not is_suited or _is_large(rows, linear):
            return self._linear(rows, linear)
        config = self._bf16.choose_split_k(len(rows), outputs, inputs, weight.itemsize)
        return self._bf16.split_k_linear(rows, weight, linear.bias, config, _scales(linear))

    def _added_fp8(self, rows: Fp8Rows, linear: Linear) -> Tensor:
        config = self._fp8.choose_split_k(*linear.weight.shape)
        return self._fp8.fp8_split_k_linear(rows, *_scaled(linear), linear.bias, config)

    def _gated_fp8(self, rows: Fp8Rows, mlp: GatedMLP) -> Fp8Rows:
        config = self._fp8.choose_gated(rows.rows)
        return self._fp8.fp8_split_k_gated_linear(rows, *_scaled(mlp.gate_up), config)

    def _gated(self, rows: Tensor, mlp: GatedMLP) -> Tensor:
        weight = mlp.gate_up.weight
        is_suited = self._bf16.suits(len(rows), len(weight) // 2, weight.shape[1], rows.dtype)
        is_suited = is_suited and not is_packed(mlp.gate_up)
        if mlp.gate_up.bias is not None or not is_suited or _is_large(rows, mlp.gate_up):
            return super()._gated(rows, mlp)
        config = self._bf16.choose_gated(len(rows), weight.itemsize)
        return self._bf16.split_k_gated_linear(rows, weight, config, _scales(mlp.gate_up))
