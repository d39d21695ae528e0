"""The matrix products of a decoder's layers on a CUDA device, and the small steps between them. Knows no attention.

    few rows     four launches a layer: norms, gate and residuals are inside the products
    many rows    the products are cuBLAS's or ours; a norm has its own launch and adds the residual on the way; so has
                 the gate, unless the product has a kernel that ends with it
    streamed     the same on Hopper GPUs: products that start early and leave their sums to whoever reads them

Which is which depends on shapes alone, so it is decided once for each CUDA graph.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm.linear_act import linear_act
from saccade.kernels.gemm.skinny import (
    MAX_ELEMENTS,
    MAX_NORMED_ROWS,
    MAX_ROWS,
    Config,
    SplitWorkspace,
    choose,
    gated_linear,
    norm_gated_linear,
    norm_linear,
    skinny_linear,
)
from saccade.kernels.launch.device import is_hopper
from saccade.kernels.launch.self_test import self_test_passes
from saccade.kernels.ops.norm import add_rms_norm, silu_and_mul
from saccade.models.layers.basic import Linear, RMSNorm
from saccade.models.layers.decoder import Decoder, DecoderLayer

_ROOM_ROWS = 512  # from here on memory counts; decoding has fewer


class Residual(NamedTuple):
    """The residual stream between two products."""

    rows: Tensor  # [T, H]
    added: Tensor | None = None  # [T, H], or parts [splits, T, H]: still to be added, by the norm that comes next


class Gemms(Protocol):
    def qkv(self, x: Residual, layer: DecoderLayer) -> tuple[Tensor, Residual]:
        """Queries, keys and values [T, (heads + 2 kv_heads) * d] of the normed stream, and the stream.

        If parts are welcome, they may come as parts [splits, T, ...].
        """
        ...

    def out(self, mixed: Tensor, x: Residual, layer: DecoderLayer) -> Residual:
        """The stream with the projection of `mixed` [T, heads * d] added."""
        ...

    def mlp(self, x: Residual, layer: DecoderLayer) -> Residual: ...

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        """What the head reads: [T, H], or of some rows (int32 [W]) alone: [W, H]."""
        ...

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        """[T, vocabulary], in the model's own type: rounding does not change which one is largest."""
        ...


def gemms_for(decoder: Decoder, rows: int, workspace: SplitWorkspace, *, in_parts: bool = False) -> Gemms:
    """Few rows are those whose widest product is ours. `in_parts` says that queries, keys and values may come so."""
    layer = decoder.layers[0]
    if rows > 1 and rows <= _max_split_k_rows(layer) and can_split_k(decoder.table.device):
        return _SplitKGemms(workspace, in_parts and layer.qk_norms is None)
    is_few = rows <= MAX_NORMED_ROWS and _gated_config(layer, rows) is not None
    return _SkinnyGemms(workspace) if is_few else _LargeGemms(workspace, _new_room(decoder, rows))


def _max_split_k_rows(layer: DecoderLayer) -> int:
    """cuBLAS shares its reads of many rows better; that counts where weights are large."""
    return 128 if layer.gate_up.weight.numel() <= MAX_ELEMENTS else 32


@lru_cache
def can_split_k(device: torch.device) -> bool:
    """Whether it is a Hopper GPU whose Triton compiles those products, and they are right."""
    return is_hopper(device) and self_test_passes(
        lambda: _try_split_k(device), "decoding goes without the Hopper products"
    )


def _try_split_k(device: torch.device) -> None:
    from saccade.kernels.gemm.hopper_split_k import (  # experimental: only if used
        PipelineConfig,
        split_k_gated_linear,
        split_k_linear,
    )

    x, weight = (torch.randn(rows, 256, device=device, dtype=torch.bfloat16) / 8 for rows in (20, 128))
    expected = F.linear(x.float(), weight.float())
    found = split_k_linear(x, weight, None, PipelineConfig(2, 2)).sum(0)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    gate, up = expected.chunk(2, dim=-1)
    found = split_k_gated_linear(x, weight, PipelineConfig(3)).float()
    torch.testing.assert_close(found, F.silu(gate) * up, atol=0.02, rtol=0.02)


def new_workspace(decoder: Decoder) -> SplitWorkspace:
    """Enough for all products of one stream."""
    return SplitWorkspace.allocate(MAX_ROWS, decoder.table.device)


def _new_room(decoder: Decoder, rows: int) -> Tensor | None:
    """Of prompts: one piece of memory for the widest products, one at a time, from the first layer to the last.

    Taken and given back layer by layer it would be cut up for narrower rows, and a second one would be needed.
    """
    if rows < _ROOM_ROWS:
        return None
    widest = max(max(len(layer.qkv.weight), len(layer.gate_up.weight)) for layer in decoder.layers)
    return decoder.table.new_empty(rows * widest)


def _gated_config(layer: DecoderLayer, rows: int) -> Config | None:
    """How gate and up are multiplied in one launch; None where cuBLAS is better, or a bias is to be added."""
    weight = layer.gate_up.weight
    if layer.gate_up.bias is not None:
        return None
    return choose(rows, len(weight) // 2, weight.shape[1], weight.dtype, gated=True)


class _SkinnyGemms:
    def __init__(self, workspace: SplitWorkspace) -> None:
        self.workspace = workspace

    def qkv(self, x: Residual, layer: DecoderLayer) -> tuple[Tensor, Residual]:
        return self._normed_linear(x, layer.attention_norm, layer.qkv), x

    def out(self, mixed: Tensor, x: Residual, layer: DecoderLayer) -> Residual:
        return self._add(mixed, layer.out, x)

    def mlp(self, x: Residual, layer: DecoderLayer) -> Residual:
        norm = layer.mlp_norm
        return self._add(norm_gated_linear(x.rows, norm.weight, norm.eps, layer.gate_up.weight), layer.down, x)

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return decoder.norm(x.rows if only is None else x.rows.index_select(0, only))

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        norm = decoder.norm
        return norm_linear(x.rows, norm.weight, norm.eps, decoder.head, workspace=self.workspace, out=out)

    def _normed_linear(self, x: Residual, norm: RMSNorm, linear: Linear) -> Tensor:
        return norm_linear(x.rows, norm.weight, norm.eps, linear.weight, linear.bias, workspace=self.workspace)

    def _add(self, rows: Tensor, linear: Linear, x: Residual) -> Residual:
        return Residual(skinny_linear(rows, linear.weight, linear.bias, x.rows, workspace=self.workspace))


class _LargeGemms:
    """What goes through `room` is forgotten when the next product is written there."""

    def __init__(self, workspace: SplitWorkspace, room: Tensor | None) -> None:
        self.workspace = workspace
        self.room = room

    def qkv(self, x: Residual, layer: DecoderLayer) -> tuple[Tensor, Residual]:
        normed, x = self._norm(x, layer.attention_norm)
        return self._linear(normed, layer.qkv, self._room_for(normed, len(layer.qkv.weight))), x

    def out(self, mixed: Tensor, x: Residual, layer: DecoderLayer) -> Residual:
        return Residual(x.rows, self._added(mixed, layer.out))

    def mlp(self, x: Residual, layer: DecoderLayer) -> Residual:
        normed, x = self._norm(x, layer.mlp_norm)
        return Residual(x.rows, self._added(self._gated(normed, layer), layer.down))

    def normed(self, x: Residual, decoder: Decoder, only: Tensor | None = None) -> Tensor:
        return self._norm(x, decoder.norm, only)[0]

    def logits(self, x: Residual, decoder: Decoder, out: Tensor) -> Tensor:
        return skinny_linear(self.normed(x, decoder), decoder.head, workspace=self.workspace, out=out)

    def _norm(self, x: Residual, norm: RMSNorm, only: Tensor | None = None) -> tuple[Tensor, Residual]:
        if x.added is None:
            return norm(x.rows if only is None else x.rows.index_select(0, only)), x
        normed, rows = add_rms_norm(x.added, x.rows, norm.weight, norm.eps, only)
        return normed, Residual(rows)

    def _linear(self, rows: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        return skinny_linear(rows, linear.weight, linear.bias, workspace=self.workspace, out=out)

    def _room_for(self, rows: Tensor, outputs: int) -> Tensor | None:
        return None if self.room is None else self.room[: len(rows) * outputs].view(len(rows), outputs)

    def _added(self, rows: Tensor, linear: Linear) -> Tensor:
        """What a norm is to add to the stream."""
        return self._linear(rows, linear)

    def _gated(self, rows: Tensor, layer: DecoderLayer) -> Tensor:
        """silu(gate) * up: [T, wide]."""
        config = _gated_config(layer, len(rows))
        if config is not None:
            return gated_linear(rows, layer.gate_up.weight, config=config)
        weight, bias = layer.gate_up.weight, layer.gate_up.bias
        found = linear_act(rows, weight, bias, "silu_and_mul", self._room_for(rows, len(weight) // 2))
        if found is not None:
            return found
        room = self._room_for(rows, len(weight))
        return silu_and_mul(self._linear(rows, layer.gate_up, room), over_gate=room is not None)


class _SplitKGemms(_LargeGemms):
    def __init__(self, workspace: SplitWorkspace, in_parts: bool) -> None:
        super().__init__(workspace, None)
        self.in_parts = in_parts

    def qkv(self, x: Residual, layer: DecoderLayer) -> tuple[Tensor, Residual]:
        normed, x = self._norm(x, layer.attention_norm)
        return self._added(normed, layer.qkv) if self.in_parts else self._linear(normed, layer.qkv), x

    def _added(self, rows: Tensor, linear: Linear) -> Tensor:
        from saccade.kernels.gemm.hopper_split_k import choose_split_k, split_k_linear, suits

        outputs, inputs = linear.weight.shape
        if not suits(len(rows), outputs, inputs, rows.dtype):
            return self._linear(rows, linear)
        return split_k_linear(rows, linear.weight, linear.bias, choose_split_k(len(rows), outputs, inputs))

    def _gated(self, rows: Tensor, layer: DecoderLayer) -> Tensor:
        from saccade.kernels.gemm.hopper_split_k import choose_gated, split_k_gated_linear, suits

        weight = layer.gate_up.weight
        if layer.gate_up.bias is not None or not suits(len(rows), len(weight) // 2, weight.shape[1], weight.dtype):
            return super()._gated(rows, layer)
        return split_k_gated_linear(rows, weight, choose_gated(len(rows)))
