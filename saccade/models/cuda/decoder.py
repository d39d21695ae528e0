"""The decoder with fused kernels, for CUDA devices: same weights and result as `Decoder.forward`.

Decode and prefill differ only in what mixes tokens: the caller passes a mixer for each kind of layers.
Nothing here reads a value back from the device, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from saccade.models.layers.decoder import Decoder, SelfAttention
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.mla import LatentAttention
from saccade.models.layers.moe import MoE
from saccade.models.layers.ruled_decoder import RuledHeads, RuledSelfAttention
from saccade.models.layers.short_convolution import ShortConvolution
from saccade.models.layers.torch_attention import PagedKV

T = TypeVar("T")
_WITHOUT_KV = (GatedDeltaNet, ShortConvolution, CrossAttention)  # kinds of layers whose states are elsewhere


class Mixing(Protocol):
    """Mixes the new tokens of a pass with what is cached: (projection, its module, index among its kind).

        attention     [T, heads + 2 kv_heads, d]: queries, keys and values before norms of heads and RoPE
                      [splits, T, ...]: split-K partials of them, if the pass asks for `in_parts`
        MLA           [T, heads * (nope + rope) + rank + rope]: queries, latent, the key's part with RoPE
        with states   [T, width of its projection]: delta nets, short convolutions
        cross         [T, heads, d]: normed queries

    The result, [T, inputs of the output projection], is written to `out` if given.
    """

    def __call__(
        self, projected: Tensor, module: Any, index: int, /, out: Tensor | None = None
    ) -> Tensor: ...


class Mixer(NamedTuple):
    """What one kind of layers does with the tokens of a pass."""

    mix: Mixing
    rows: Tensor | None = None  # [T, 1] in the model's dtype: 1 for rows that it changes, else 0; None: all


class Mixers(NamedTuple):
    by_kind: Mapping[type, Mixer]  # by the class of a layer's attention; layers of other kinds are skipped
    positions: Tensor | None = None  # int32 [rows, T]: for layers that apply RoPE themselves


class FusedDecoder:
    is_table = True  # the embedding of a token is its row of the table

    def __init__(self, decoder: Decoder, kv: PagedKV) -> None:
        self.decoder = decoder
        self.is_table = decoder.embedding_gain == 1
        self.kv = kv
        module = next(
            layer.attention for layer in decoder.layers if not isinstance(layer.attention, _WITHOUT_KV)
        )
        self.heads = Heads(module.heads, module.kv_heads, module.head_dim)
        norms = getattr(module, "qk_norms", None)
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
            kind = kind_of(layer.attention)
            counted = kind if kind in _WITHOUT_KV else SelfAttention
            index = counts[counted]
            counts[counted] += 1
            mixer = mixers.by_kind.get(kind)
            if mixer is None:
                continue
            # Functions: their memory is free before the MLP begins.
            x = _LAYERS[kind](x, layer, index, mixer, gemms).added_by(layer, "attention_sum")
            scales = None if mixer.rows is None else mixer.rows * layer.mlp_gate.tanh()
            x = gemms.mlp(x, layer.mlp_norm, layer.mlp, scales).added_by(layer, "mlp_sum")
            if number < len(deep):
                x.addend.add_(deep[number])
        return x

    def finish(self, logits: Tensor) -> None:
        """What follows the head's GEMM, in place."""
        if self.decoder.tail is not None:
            logits.copy_(self.decoder.tail(logits.float()))

    def first(self, kind: type[T]) -> T | None:
        """The first attention of this kind."""
        return next(
            (layer.attention for layer in self.decoder.layers if isinstance(layer.attention, kind)), None
        )

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer's projection, or of its split-K partials."""
        heads = self.heads
        q, k, v = torch.split(qkv, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=-2)
        return q, k, v

    @property
    def block_row(self) -> int | None:
        """Of a prompt's positions, if it has one: which block each token is in."""
        return -1 if getattr(self.decoder, "has_blocks", False) else None

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
    return list({(_shape_of(layer.attention), type(layer.mlp)): layer for layer in layers}.values())


def _shape_of(attention: Any) -> tuple[object, ...]:
    form = getattr(attention, "form", None)
    if isinstance(form, RuledHeads):
        return (type(attention), *form[:3], form.rule.window, form.turn.start)
    return (type(attention),)


def _derive_weights(decoder: Decoder) -> None:
    """What layers compute of weights and keep. In a graph that is never replayed it would be garbage."""
    for layer in decoder.layers:
        module = layer.attention
        norms = [layer.attention_norm, layer.mlp_norm, getattr(module, "norm", None)]
        heads = getattr(module, "qk_norms", None)
        norms += [heads.q, heads.k] if heads else []
        for norm in norms:
            getattr(norm, "weight", None)
        experts = getattr(layer.mlp, "experts", layer.mlp)
        if isinstance(experts, MoE):
            prepare_moe(experts)
    getattr(decoder.norm, "weight", None)


def _self_attention(x: Residual, layer: Any, index: int, mixer: Mixer, gemms: Gemms) -> Residual:
    module = layer.attention
    count = module.heads + 2 * module.kv_heads
    has_gate = len(module.qkv.weight) > count * module.head_dim
    in_parts = not has_gate and not isinstance(module, RuledSelfAttention)
    qkv, x = gemms.project(x, layer.attention_norm, module.qkv, in_parts=in_parts)
    projected = qkv.view(*qkv.shape[:-1], -1, module.head_dim)
    mixed = mixer.mix(projected[..., :count, :], module, index)
    if has_gate:
        mixed = sigmoid_gate(mixed, projected[:, count:].flatten(1))
    return gemms.add(mixed, module.out, x)


def _latent_attention(x: Residual, layer: Any, index: int, mixer: Mixer, gemms: Gemms) -> Residual:
    module = layer.attention
    projected, x = gemms.project(x, layer.attention_norm, module.inputs)
    if module.q_norm is not None:  # and `q_up`
        first, kv = projected.tensor_split([module.q_up.inputs], dim=-1)
        projected = torch.cat((module.q_up(module.q_norm(first)), kv), dim=-1)
    return gemms.add(mixer.mix(projected, module, index), module.out, x)


def _with_states(x: Residual, layer: Any, index: int, mixer: Mixer, gemms: Gemms) -> Residual:
    module = layer.attention
    projected, x = gemms.project(x, layer.attention_norm, module.inputs, module.gates)
    return gemms.add(mixer.mix(projected, module, index), module.out, x)


def _cross_attention(x: Residual, layer: CrossLayer, index: int, mixer: Mixer, gemms: Gemms) -> Residual:
    """Scaling what goes into the last GEMM, here and in the MLP, scales what comes out."""
    assert mixer.rows is not None
    module = layer.attention
    q, x = gemms.project(x, layer.attention_norm, module.q)
    queries = module.q_norm(q.view(len(q), module.heads, module.head_dim))
    mixed = mixer.mix(queries, module, index).mul_(mixer.rows * layer.attention_gate.tanh())
    return gemms.add(mixed, module.out, x)


_LAYERS: Mapping[type, Callable[[Residual, Any, int, Mixer, Gemms], Residual]] = {
    SelfAttention: _self_attention,
    RuledSelfAttention: _self_attention,
    LatentAttention: _latent_attention,
    GatedDeltaNet: _with_states,
    ShortConvolution: _with_states,
    CrossAttention: _cross_attention,
}
"""From the residual to the residual with a layer's mixed tokens added, before its MLP."""


def kind_of(attention: Any) -> type:
    """Families may have an attention of their own, which is called like a `SelfAttention`."""
    return type(attention) if type(attention) in _LAYERS else SelfAttention
