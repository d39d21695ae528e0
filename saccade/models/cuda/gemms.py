"""The GEMMs of a decoder's layers on a CUDA device, with norms, gates and residuals. Knows no attention.

    GEMMs      norm, gate, residual
    split-K    gate fused; the norm adds residual and partials
    skinny     all fused: four launches per layer; experts take normed rows and add the residual
    large      the norm adds the residual; gate fused where `skinny` or `linear_act` has a kernel

`_REGIMES` has the rows of each, and `gemm_table` the kernels for each kind of weight. Both choices depend on
shapes alone, so they are made once for each CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.gemm.skinny import (
    MAX_ELEMENTS,
    MAX_NORMED_ROWS,
    MAX_ROWS,
    MAX_SCALED_ROWS,
    SplitWorkspace,
    norm_linear,
    skinny_linear,
)
from saccade.kernels.moe.experts_gemv import MAX_TOKENS as MAX_VECTOR_TOKENS
from saccade.kernels.ops.norm import Added, add_rms_norm, norm_fp8, rms_norm
from saccade.kernels.ops.quantize_rows import Fp8Rows
from saccade.models.cuda.gemm_self_tests import can_split_k, can_split_k_fp8, can_split_k_int4
from saccade.models.cuda.gemm_table import ADDED, GATED, LARGE, SKINNY, WHOLE, Inputs, Launches, Table
from saccade.models.cuda.gemm_weights import Fp8Blocks, Int4, Plain, weight_of
from saccade.models.cuda.moe import run_moe, runs_in_one
from saccade.models.cuda.residual import Gemms, Residual
from saccade.models.layers.cross_attention import CrossAttention
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.hybrid_decoder import KEEPS_STATES
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.mla import LatentAttention
from saccade.models.layers.mlp import GatedMLP
from saccade.models.layers.moe import MoE
from saccade.models.layers.ruled_decoder import MLPBesideExperts

logger = logging.getLogger(__name__)

_MIN_INT4_WIDTH = 4096  # of a layer: one row of narrower ones was not measured, or is slower by split-K
_MIN_SCRATCH_ROWS = 512  # from here on memory counts; decode has fewer


class DecoderGemms:
    """The weights of a decoder's layers, and the GEMMs with them for each number of rows."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.weights = {linear: weight_of(linear) for linear in _linears(decoder)}
        for layer in decoder.layers:
            if isinstance(layer.mlp, GatedMLP):
                self.weights[layer.mlp.gate_up].gelu = layer.mlp.gelu
        together = [[self.weights[linear] for linear in group] for group in _wide_linears(decoder)]
        self.first = [group[0] for group in together]
        self.wide = [weight for group in together for weight in group]
        self.is_small = max(weight.elements for weight in self.wide) <= MAX_ELEMENTS
        self._kinds = {type(weight) for weight in self.weights.values()}
        self._widest = max(sum(weight.outputs for weight in group) for group in together)
        self.workspace = SplitWorkspace.allocate(MAX_ROWS, decoder.table.device)
        packed = [weight.elements for weight in self.weights.values() if isinstance(weight, Int4)]
        if packed:
            self.workspace = self.workspace._replace(unpacked=decoder.table.new_empty(max(packed)))

    def for_rows(self, rows: int, *, in_parts: bool = False) -> Gemms:
        """`in_parts`: attention accepts queries, keys and values as split-K partials."""
        regime = self.regime(rows)
        logger.debug("%d rows by %s GEMMs: %s", rows, regime.name, regime.reason)
        table = self.decoder.table
        x = Inputs(rows, table.dtype, table.device)
        if regime.name == "skinny":
            return SkinnyGemms(SKINNY, x, self.workspace, self.weights)
        if regime.name == "split-K":
            return NormedGemms(_split_k_table(), x, self.workspace, self.weights, in_parts=in_parts)
        scratch = table.new_empty(rows * self._widest) if rows >= _MIN_SCRATCH_ROWS else None
        return NormedGemms(LARGE, x, self.workspace, self.weights, scratch=scratch)

    def regime(self, rows: int) -> Regime:
        self.decide_kernels()
        return next(one for one in _REGIMES if rows in one.rows and one.suits(self, rows))

    def decide_kernels(self) -> bool:
        """Before a CUDA graph is captured; whether split-K reads some wide weights as they are quantised."""
        table = self.decoder.table
        read = {kind for kind in self._kinds if kind.decide(table.device, table.dtype)}
        return any(type(weight) in read for weight in self.wide)


class NormedGemms(Launches):
    """GEMMs between which kernels norm the rows and add the residual."""

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        if in_parts and self.in_parts:
            assert beside is None, "split-K partials of two GEMMs would be two tensors"
            weight = self.weights[linear]
            normed, x = self._norm_for(x, norm, (ADDED, weight))
            return self.run(ADDED, weight, normed), x
        weights = self.both(linear, beside)
        normed, x = self._norm_for(x, norm, *((WHOLE, weight) for weight in weights))
        return self.side_by_side(weights, normed, x.rows), x

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        return Residual(x.rows, self.run(ADDED, self.weights[linear], rows))

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        if isinstance(mlp, MLPBesideExperts):
            return self._beside_experts(x, mlp)
        if isinstance(mlp, MoE):
            assert scales is None, "layers with a gate have no experts"
            rows, x = self._norm(x, norm)
            return Residual(x.rows, run_moe(rows, mlp))
        gate_up = self.weights[mlp.gate_up]
        if scales is None:
            normed, x = self._norm_for(x, norm, (GATED, gate_up), (ADDED, self.weights[mlp.down]))
            return self.add(self.run(GATED, gate_up, normed), mlp.down, x)
        rows, x = self._norm(x, norm)
        return self.add(self.run(GATED, gate_up, rows).mul_(scales), mlp.down, x)

    def _beside_experts(self, x: Residual, mlp: MLPBesideExperts) -> Residual:
        assert x.added is not None
        normed, rows = add_rms_norm(x.added, x.rows, mlp.in_norms, mlp.eps, added=x.how)
        dense = self.run(ADDED, self.weights[mlp.down], self.run(GATED, self.weights[mlp.gate_up], normed[0]))
        dense = rms_norm(dense, mlp.mlp_out.weight, mlp.mlp_out.eps, like=rows)
        routed = run_moe(normed[1], mlp.experts, routed_by=normed[2])
        norm = mlp.experts_out
        _, both = add_rms_norm(routed, dense, norm.weight, norm.eps, added=Added(norm.weight, norm.eps))
        return Residual(rows, both)

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return self._norm(x, decoder.norm, only)[0]

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        return skinny_linear(self.normed(x, decoder), decoder.head, workspace=self.workspace, out=out)

    def _norm(self, x: Residual, norm: RMSNorm, only: Tensor | None = None) -> tuple[Tensor, Residual]:
        if x.added is None:
            return norm(x.rows_at(only)), x
        normed, rows = add_rms_norm(x.added, x.rows, norm.weight, norm.eps, only, x.how)
        return normed, Residual(rows)

    def _norm_for(
        self, x: Residual, norm: RMSNorm, *gemms: tuple[str, Plain]
    ) -> tuple[Tensor | Fp8Rows, Residual]:
        """In float8, if all of these operations with these weights read it."""
        if any(self.way(operation, weight, in_fp8=True) is None for operation, weight in gemms):
            return self._norm(x, norm)
        normed, rows = norm_fp8(x.added, x.rows, norm.weight, norm.eps, x.how)
        return normed, Residual(rows)


class SkinnyGemms(Launches):
    """GEMMs that norm the rows and add the residual themselves."""

    def project(
        self,
        x: Residual,
        norm: RMSNorm,
        linear: Linear,
        beside: Linear | None = None,
        *,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        weights = self.both(linear, beside)
        return self.side_by_side(weights, x.rows, x.rows, norm=norm), x

    def add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        return Residual(self.run(ADDED, self.weights[linear], rows, residual=x.rows))

    def mlp(self, x: Residual, norm: RMSNorm, mlp: GatedMLP | MoE, scales: Tensor | None = None) -> Residual:
        if isinstance(mlp, MoE):
            return Residual(run_moe(rms_norm(x.rows, norm.weight, norm.eps), mlp, x.rows))
        gated = self.run(GATED, self.weights[mlp.gate_up], x.rows, norm=norm)
        return self.add(gated if scales is None else gated.mul_(scales), mlp.down, x)

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return decoder.norm(x.rows_at(only))

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        norm = decoder.norm
        return norm_linear(x.rows, norm.weight, norm.eps, decoder.head, workspace=self.workspace, out=out)


def rows_by(operation: str, x: Tensor, weight: Plain, workspace: SplitWorkspace) -> Tensor:
    """[T, outputs], for layers that are not a decoder's of ours. Of gate and up silu(gate) * up."""
    max_rows = _max_split_rows(weight.elements <= MAX_ELEMENTS, type(weight) is not Plain)
    splits = 1 < len(x) <= max_rows and can_split_k(x.device)
    table = _split_k_table() if splits else LARGE
    rows = Inputs(len(x), x.dtype, x.device)
    return Launches(table, rows, workspace, {}).run(operation, weight, x)  # type: ignore[no-any-return]


def _linears(decoder: Decoder) -> Iterator[Linear]:
    """Of attention and MLPs."""
    for layer in decoder.layers:
        for module in (layer.attention, layer.mlp):
            yield from (part for part in vars(module).values() if isinstance(part, Linear))


def _wide_linears(decoder: Decoder) -> Iterator[list[Linear]]:
    """The first GEMM of every attention, with one beside it, and of every MLP without experts."""
    for layer in decoder.layers:
        attention = layer.attention
        if isinstance(attention, KEEPS_STATES):
            gates = attention.gates
            yield [attention.inputs] if gates is None else [attention.inputs, gates]
        elif isinstance(attention, LatentAttention):
            yield [attention.inputs]
        else:
            yield [attention.q if isinstance(attention, CrossAttention) else attention.qkv]
        if isinstance(layer.mlp, GatedMLP):
            yield [layer.mlp.gate_up]


def _split_k_table() -> Table:
    from saccade.models.cuda.split_k_table import SPLIT_K  # Gluon is experimental: only where used

    return SPLIT_K


# --- which GEMMs run how many rows ---


class Regime(NamedTuple):
    name: str
    rows: range
    suits: Callable[[DecoderGemms, int], bool]
    reason: str  # for the log


def _max_split_rows(is_small: bool, is_quantized: bool = False) -> int:
    """cuBLAS reuses what it reads better over many rows; that counts where weights are large."""
    if is_small:
        return 128
    return MAX_SCALED_ROWS if is_quantized else MAX_ROWS


def _splits(gemms: DecoderGemms, rows: int) -> bool:
    max_rows = _max_split_rows(gemms.is_small, gemms.decide_kernels())
    return rows <= max_rows and can_split_k(gemms.decoder.table.device)


def _splits_one(gemms: DecoderGemms, rows: int) -> bool:
    """INT4 gains in wide layers; with experts it does not, and delta nets were not measured."""
    table = gemms.decoder.table
    layers = gemms.decoder.layers
    dense = [layer.mlp for layer in layers if isinstance(layer.mlp, GatedMLP)]
    weights = [gemms.weights[linear] for mlp in dense for linear in (mlp.gate_up, mlp.down)]
    if all(isinstance(weight, Fp8Blocks) for weight in (*weights, *gemms.first)):
        return table.dtype == torch.bfloat16 and can_split_k(table.device) and can_split_k_fp8(table.device)
    has_nets = any(isinstance(layer.attention, GatedDeltaNet) for layer in layers)
    if has_nets or len(dense) < len(layers) or gemms.decoder.hidden_size < _MIN_INT4_WIDTH:
        return False
    if not all(map(_is_whole_int4, gemms.weights.values())):
        return False
    return can_split_k(table.device) and can_split_k_int4(table.device, table.dtype)


def _is_whole_int4(weight: Plain) -> bool:
    """Whole tiles of 64 rows for split-K, also those of a gate."""
    return isinstance(weight, Int4) and weight.outputs % 128 == 0


def _is_skinny(gemms: DecoderGemms, rows: int) -> bool:
    for layer in gemms.decoder.layers:
        if getattr(layer, "attention_sum", None) is not None:
            return False
        if isinstance(layer.mlp, MoE):
            if rows > MAX_VECTOR_TOKENS or not runs_in_one(layer.mlp):
                return False
        elif gemms.weights[layer.mlp.gate_up].gate_config(rows) is None:
            return False
    return True


_REGIMES = (
    Regime("split-K", range(1, 2), _splits_one, "MMAs read all weights as they are, and they are quantised"),
    Regime("split-K", range(2, 129), _splits, "few rows by weights that cuBLAS would not reuse better"),
    Regime(
        "skinny", range(1, MAX_NORMED_ROWS + 1), _is_skinny, "gates are small, or few tokens have experts"
    ),
    Regime("large", range(1, 1 << 31), lambda *_: True, "nothing else suits"),
)
