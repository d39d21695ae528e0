"""Layers of Transformers that differ in their attention, as those of a decoder of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.own_experts import experts_beside, router_norm
from saccade.models.bridge.own_modules import Modules, eps_of, set_norm
from saccade.models.bridge.own_rotation import Rotation
from saccade.models.layers.attention_rules import AttentionRule
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.ruled_decoder import MLPBesideExperts, RuledHeads, RuledLayers
from saccade.models.state_dict import Parameters


def ruled_layers(
    layers: Sequence[Modules],
    rotations: Mapping[int, Rotation],
    rules: Mapping[int, AttentionRule],
    text: TextConfig,
) -> RuledLayers | None:
    """None: all layers are alike, and causal."""
    beside, *others = {experts_beside(layer) if "experts_in" in layer else None for layer in layers}
    if others:
        raise Unfit("its layers differ in their experts")
    heads = [
        _heads(layer, rotations[index], rules.get(index, AttentionRule()), text, distinct(rotations))
        for index, layer in enumerate(layers)
    ]
    usual = RuledHeads(
        text.num_heads, text.num_kv_heads, text.head_dim, AttentionRule(), slice(0, text.head_dim // 2), False
    )
    if beside is None and all(one == usual for one in heads):
        return None
    return RuledLayers(heads, bool(layers[0]["attention_sum"]), beside)


def distinct(rotations: Mapping[int, Rotation]) -> list[Rotation]:
    return list({id(rotation): rotation for rotation in rotations.values()}.values())


def _heads(
    layer: Modules, rotation: Rotation, rule: AttentionRule, text: TextConfig, rotations: Sequence[Rotation]
) -> RuledHeads:
    dim = 2 * len(rotation.frequencies)
    heads, kv_heads = text.num_heads, text.num_kv_heads
    if len(layer["qkv"]) > 1:
        heads, kv_heads = (part.out_features // dim for part in layer["qkv"][:2])
    first = sum(len(one.frequencies) for one in rotations[: _place(rotation, rotations)])
    if rule.blocks is not None:
        rule = rule._replace(blocks=torch.empty(0))
    turn = slice(first, first + dim // 2)
    return RuledHeads(heads, kv_heads, dim, rule, turn, _norms_values(layer))


def _place(rotation: Rotation, rotations: Sequence[Rotation]) -> int:
    return next(place for place, one in enumerate(rotations) if one is rotation)


def _norms_values(layer: Modules) -> bool:
    """By no weight, with the eps of keys."""
    if not layer["v_norm"]:
        return False
    norm, keys = layer["v_norm"][0], layer["k_norm"]
    x = torch.linspace(-2, 3, 64)[None]
    is_plain = torch.allclose(norm(x), torch.nn.functional.rms_norm(x, (64,), eps=eps_of(norm)), atol=1e-5)
    if list(norm.parameters()) or not is_plain or not keys or eps_of(keys[0]) != eps_of(norm):
        raise Unfit("its values are normed in another way")
    return True


def set_beside_experts(ours: MLPBesideExperts, layer: Modules, mlp_norm: Tensor) -> None:
    """Norms around an MLP and the experts beside it."""
    norms = [RMSNorm(Parameters(mlp_norm.dtype, torch.device("meta")), len(mlp_norm), 0.0)]
    set_norm(norms[0], layer["experts_in"][0])
    for norm, name in ((ours.mlp_out, "mlp_out"), (ours.experts_out, "experts_out")):
        set_norm(norm, layer[name][0])
    ours.eps = eps_of(layer["mlp_norm"][0])
    router = layer["router"][0]
    if {norms[0].eps, eps_of(router), ours.eps} != {ours.eps}:
        raise Unfit("its norms before MLP, experts and router differ")
    rows = [mlp_norm, norms[0].weight, router_norm(router)]
    ours.in_norms = torch.stack([row.float() for row in rows])


def joined(rotations: Mapping[int, Rotation]) -> tuple[Tensor, Tensor, float]:
    """Frequencies and axes of all, and their gain."""
    kinds = distinct(rotations)
    if len({one.gain for one in kinds}) > 1:
        raise Unfit("its layers differ in the gain of their RoPE")
    frequencies = torch.cat([one.frequencies for one in kinds])
    return frequencies, torch.cat([one.axes for one in kinds]), kinds[0].gain
