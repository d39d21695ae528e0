"""The decoder with fused kernels, for CUDA devices: same weights and result as `Decoder.forward`.

Decode and prefill differ only in the attention that the caller passes in. Nothing here reads a value back
from the device, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from saccade.kernels.launch.compile_ahead import is_compiling
from saccade.kernels.launch.device import Heads
from saccade.kernels.ops.output_gate import sigmoid_gate
from saccade.kernels.ops.prepare_inputs import Temperature
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.cuda.moe import prepare_moe
from saccade.models.cuda.residual import Gemms, Residual
from saccade.models.layers.cross_attention import CrossAttention, CrossLayer
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.mla import LatentAttention
from saccade.models.layers.moe import MoE
from saccade.models.layers.torch_attention import PagedKV

T = TypeVar("T")
_WITHOUT_KV = (GatedDeltaNet, CrossAttention)  # their states are elsewhere


class Mixing(Protocol):
    """Mixes the new tokens of a pass with what is cached: (projection, its module, index among its kind).

        attention     [T, heads + 2 kv_heads, d]: queries, keys and values before norms of heads and RoPE
                      [splits, T, ...]: split-K partials of them, if the pass asks for `in_parts`
        MLA           [T, heads * (nope + rope) + rank + rope]: queries, latent, the key's part with RoPE
        delta net     [T, width of its projection]
        cross         [T, heads, d]: normed queries

    The result, [T, inputs of the output projection], is written to `out` if given.
    """

    def __call__(
        self, projected: Tensor, module: Any, index: int, /, out: Tensor | None = None
    ) -> Tensor: ...


class Crossing(NamedTuple):
    """Cross-attention of a pass."""

    attend: Mixing
    rows: Tensor  # [T, 1] in the model's dtype: 1 for rows that attend to images, 0 for others


class Mixers(NamedTuple):
    attend: Mixing
    delta: Mixing | None = None  # of decoders with gated delta nets
    cross: Crossing | None = None  # None: no row attends to an image, so such layers are skipped
    positions: Tensor | None = None  # int32 [T]: for layers that apply RoPE themselves


class FusedDecoder:
    def __init__(self, decoder: Decoder, kv: PagedKV) -> None:
        self.decoder = decoder
        self.kv = kv
        self.net = _first(decoder, GatedDeltaNet)  # for its shape, as the next
        self.latent = _first(decoder, LatentAttention)
        attention = next(
            layer.attention for layer in decoder.layers if not isinstance(layer.attention, _WITHOUT_KV)
        )
        self.heads = Heads(attention.heads, attention.kv_heads, attention.head_dim)
        norms = getattr(attention, "qk_norms", None)
        self.norm_eps: float | None = norms.eps if norms else None  # of query and key heads
        self._gemms = DecoderGemms(decoder)
        _derive_weights(decoder)

    def gemms(self, rows: int, *, in_parts: bool = False) -> Gemms:
        return self._gemms.for_rows(rows, in_parts=in_parts)

    def forward(self, embeds: Tensor, mixers: Mixers, gemms: Gemms) -> Residual:
        """[T, H], or wider rows as `Decoder.parts` reads them -> the residual after the last layer."""
        first, *deep = self.decoder.parts(embeds)
        x = Residual(first.contiguous())
        counts = Counter[type]()  # layers of each kind; all that have keys and values are one
        layers = self.decoder.layers
        for number, layer in enumerate(_one_of_each_kind(layers) if is_compiling() else layers):
            kind = type(layer.attention)
            counted = kind if kind in _WITHOUT_KV else object
            index = counts[counted]
            counts[counted] += 1
            # Methods: their memory is free before the MLP begins.
            if kind is CrossAttention:
                x = x if mixers.cross is None else self._cross(x, layer, index, mixers.cross, gemms)
                continue
            if kind is GatedDeltaNet:
                assert mixers.delta is not None
                x = self._delta(x, layer, index, mixers.delta, gemms)
            elif kind is LatentAttention:
                x = self._latent(x, layer, index, mixers.attend, gemms)
            else:
                x = self._attention(x, layer, index, mixers.attend, gemms)
            x = gemms.mlp(x, layer.mlp_norm, layer.mlp)
            if number < len(deep):
                (x.rows if x.added is None else x.added.view(-1, *x.rows.shape)[0]).add_(deep[number])
        return x

    def _attention(self, x: Residual, layer: Any, index: int, attend: Mixing, gemms: Gemms) -> Residual:
        attention = layer.attention
        count = attention.heads + 2 * attention.kv_heads
        has_gate = len(attention.qkv.weight) > count * attention.head_dim
        qkv, x = gemms.project(x, layer.attention_norm, attention.qkv, in_parts=not has_gate)
        projected = qkv.view(*qkv.shape[:-1], -1, attention.head_dim)
        mixed = attend(projected[..., :count, :], attention, index)
        if has_gate:
            mixed = sigmoid_gate(mixed, projected[:, count:].flatten(1))
        return gemms.add(mixed, attention.out, x)

    def _latent(self, x: Residual, layer: Any, index: int, attend: Mixing, gemms: Gemms) -> Residual:
        attention = layer.attention
        projected, x = gemms.project(x, layer.attention_norm, attention.inputs)
        if attention.q_norm is not None and attention.q_up is not None:
            first, kv = projected.tensor_split([attention.q_up.inputs], dim=-1)
            projected = torch.cat((attention.q_up(attention.q_norm(first)), kv), dim=-1)
        return gemms.add(attend(projected, attention, index), attention.out, x)

    def _delta(self, x: Residual, layer: Any, index: int, mix: Mixing, gemms: Gemms) -> Residual:
        net = layer.attention
        projected, x = gemms.project(x, layer.attention_norm, net.inputs, net.gates)
        return gemms.add(mix(projected, net, index), net.out, x)

    def _cross(self, x: Residual, layer: CrossLayer, index: int, cross: Crossing, gemms: Gemms) -> Residual:
        """With its MLP. Scaling what goes into the last GEMM of each scales what comes out."""
        attention = layer.attention
        q, x = gemms.project(x, layer.attention_norm, attention.q)
        queries = attention.q_norm(q.view(len(q), attention.heads, attention.head_dim))
        mixed = cross.attend(queries, attention, index).mul_(cross.rows * layer.attention_gate.tanh())
        x = gemms.add(mixed, attention.out, x)
        return gemms.mlp(x, layer.mlp_norm, layer.mlp, cross.rows * layer.mlp_gate.tanh())

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer's projection, or of its split-K partials."""
        heads = self.heads
        q, k, v = torch.split(qkv, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=-2)
        return q, k, v

    @property
    def temperature(self) -> Temperature | None:
        temperature = self.decoder.temperature
        return Temperature(temperature.beta, temperature.length) if temperature else None

    @property
    def scale(self) -> float:
        return self.decoder.scale

    @property
    def vocab_size(self) -> int:
        return self.decoder.head.shape[0]


def _one_of_each_kind(layers: Sequence[Any]) -> list[Any]:
    """Layers of a kind launch the same kernels."""
    return list({(type(layer.attention), type(layer.mlp)): layer for layer in layers}.values())


def _derive_weights(decoder: Decoder) -> None:
    """What layers compute of weights and keep. In a graph that is never replayed it would be garbage."""
    for layer in decoder.layers:
        attention = layer.attention
        norms = [layer.attention_norm, layer.mlp_norm, getattr(attention, "norm", None)]
        heads = getattr(attention, "qk_norms", None)
        norms += [heads.q, heads.k] if heads else []
        for norm in norms:
            getattr(norm, "weight", None)
        if isinstance(layer.mlp, MoE):
            prepare_moe(layer.mlp)
    getattr(decoder.norm, "weight", None)


def _first(decoder: Decoder, kind: type[T]) -> T | None:
    """The first attention of this kind."""
    return next((layer.attention for layer in decoder.layers if isinstance(layer.attention, kind)), None)
