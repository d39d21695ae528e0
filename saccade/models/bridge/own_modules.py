"""Modules of Transformers' layers by what they are in ours, and how their weights become ours.

q_proj  k_proj  v_proj ──► qkv        one tensor: Transformers' weights are views of it
gate_proj   up_proj    ──► gate_up
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from saccade.models.bridge.errors import Unfit
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear

Modules = Mapping[str, Sequence[Any]]  # of a layer, by our names; nothing for one that it may lack
_Names = Mapping[str, tuple[tuple[str, ...], ...]]  # ours: theirs, as parts or fused; empty: it may lack

_ATTENTION: _Names = {
    "attention_norm": (("input_layernorm",),),
    "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.qkv_proj",)),
    "q_norm": (("self_attn.q_norm",), ()),
    "k_norm": (("self_attn.k_norm",), ()),
    "out": (("self_attn.o_proj",),),
    "mlp_norm": (("post_attention_layernorm",),),
}
_MLP: _Names = {
    "gate_up": (("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_up_proj",)),
    "down": (("mlp.down_proj",),),
}
_SHARED = ("mlp.shared_experts", "mlp.shared_expert")
_EXPERTS: _Names = {
    "experts": (("mlp.experts",),),
    "router": (("mlp.gate",), ("mlp.router",)),
    "shared.gate_up": (*((f"{name}.gate_proj", f"{name}.up_proj") for name in _SHARED), ()),
    "shared.down": (*((f"{name}.down_proj",) for name in _SHARED), ()),
    "shared_gate": (("mlp.shared_expert_gate",), ()),
}
_ACTIVATIONS = ("act_fn", "activation_fn")
_EPS = ("variance_epsilon", "eps")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of a norm


def modules_of(layer: Any) -> Modules:
    """Raises Unfit if it has other weights as well."""
    known = dict(layer.named_modules())
    found: dict[str, list[Any]] = {}
    for name, choices in {**_ATTENTION, **(_EXPERTS if "mlp.experts" in known else _MLP)}.items():
        names = next((names for names in choices if all(part in known for part in names)), None)
        if names is None:
            raise Unfit(f"its layers have no {choices[0][0]}")
        found[name] = [known[part] for part in names]
    ours = [part for parts in found.values() for part in parts]
    seen = {id(tensor) for part in ours for tensor in (*part.parameters(), *part.buffers())}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if id(tensor) not in seen and not name.endswith("inv_freq"):
            raise Unfit(f"its layers have {name}, which ours have not")
    if len(found["q_norm"]) != len(found["k_norm"]):
        raise Unfit("its layers norm queries or keys, not both")
    _check_steps(layer)
    return found


def _check_steps(layer: Any) -> None:
    """What a layer does beside its weights, as far as it says so; the proof finds the rest."""
    x = torch.linspace(-6, 6, 49)
    for module in layer.modules():
        act = next((act for name in _ACTIVATIONS if (act := getattr(module, name, None))), None)
        if act is not None and not torch.allclose(act(x), F.silu(x), atol=1e-6):
            raise Unfit(f"its MLPs activate by {type(act).__name__}, ours by SiLU")


def has_bias(layers: Sequence[Modules], *names: str) -> bool:
    return any(part.bias is not None for layer in layers for name in names for part in layer.get(name, ()))


def check_shapes(name: str, ours: Linear, theirs: Sequence[Any], parts: Sequence[int]) -> None:
    """`parts`: rows of each, where a tensor of theirs has no more than one."""
    if any(type(part) is not nn.Linear or part.weight.dtype != ours.weight.dtype for part in theirs):
        raise Unfit(f"its {name} is more than a matrix")
    if ours.bias is None and any(part.bias is not None for part in theirs):
        raise Unfit(f"its {name} has a bias")
    rows = [len(part.weight) for part in theirs]
    is_whole = len(rows) == 1 and rows == [sum(parts)]
    if theirs[0].weight.shape[1] != ours.inputs or not (is_whole or rows == list(parts)):
        raise Unfit(f"its {name} has other sizes than its config tells of")


def share(ours: Linear, theirs: Sequence[Any]) -> None:
    """Their originals are given up, one after the other."""
    ours.weight = theirs[0].weight.data
    if len(theirs) > 1:
        ours.weight = torch.cat([part.weight.data for part in theirs])
        parts = torch.split(ours.weight, [len(part.weight) for part in theirs])
        for part, rows in zip(theirs, parts, strict=True):
            part.weight.data = rows
    if ours.bias is not None:
        zeros = [part.weight.new_zeros(len(part.weight)) for part in theirs]
        pairs = zip(theirs, zeros, strict=True)
        ours.bias = torch.cat([none if part.bias is None else part.bias.data for part, none in pairs])


def set_norm(ours: RMSNorm, theirs: Any) -> None:
    weight = theirs.weight.data
    ours.eps = float(next(getattr(theirs, name) for name in _EPS if hasattr(theirs, name)))
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected = theirs(x)
    tolerance = _TOLERANCE[weight.dtype]
    for candidate in (weight, 1 + weight):
        found = F.rms_norm(x, weight.shape, candidate, ours.eps)
        if weight.shape == ours.weight.shape and torch.allclose(found, expected, tolerance, tolerance):
            ours.weight = candidate.to(ours.weight.dtype)
            return
    raise Unfit(f"its {type(theirs).__name__} is no RMS norm like ours")
