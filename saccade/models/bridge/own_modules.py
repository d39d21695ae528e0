"""Modules of Transformers' layers by what they are in ours, and how their weights become ours.

q_proj  k_proj  v_proj ──► qkv        one tensor: Transformers' weights are views of it
gate_proj   up_proj    ──► gate_up
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.stored import (
    dtype_of,
    is_matrix,
    keep,
    named_weights,
    restore,
    side_by_side,
)
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters

Modules = Mapping[str, Sequence[Any]]  # of a layer, by our names; nothing for one that it may lack
_Names = Mapping[str, tuple[tuple[str, ...], ...]]  # ours: theirs, as parts or fused; empty: it may lack

_NORMS: _Names = {
    "attention_norm": (("input_layernorm",), ("operator_norm",)),
    "mlp_norm": (("pre_feedforward_layernorm",), ("post_attention_layernorm",), ("ffn_norm",)),
    "attention_sum": (
        ("post_self_attn_layernorm",),
        ("post_attention_layernorm", "pre_feedforward_layernorm"),  # with the second, the first is this norm
        (),
    ),
    "mlp_sum": (("post_mlp_layernorm",), ("post_feedforward_layernorm",), ()),
}
_ATTENTION: _Names = {
    "qkv": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.qkv_proj",),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.k_proj"),  # values are keys before their norm
    ),
    "v_norm": (("self_attn.v_norm",), ()),
    "q_norm": (("self_attn.q_norm",), ("self_attn.q_layernorm",), ()),
    "k_norm": (("self_attn.k_norm",), ("self_attn.k_layernorm",), ()),
    "out": (("self_attn.o_proj",), ("self_attn.out_proj",)),
}
_KEEPS_STATES: Mapping[str, _Names] = {  # by the name that such layers have instead of self_attn
    "linear_attn": {
        "inputs": (tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),),
        "conv": (("linear_attn.conv1d.weight",),),
        "decay": (("linear_attn.A_log",),),
        "decay_bias": (("linear_attn.dt_bias",),),
        "gated_norm": (("linear_attn.norm",),),
        "out": (("linear_attn.out_proj",),),
    },
    "conv": {
        "inputs": (("conv.in_proj",),),
        "conv": (("conv.conv.weight",),),
        "out": (("conv.out_proj",),),
    },
}
_MLP: _Names = {
    "gate_up": (
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.gate_up_proj",),
        ("feed_forward.w1", "feed_forward.w3"),
    ),
    "down": (("mlp.down_proj",), ("feed_forward.w2",)),
}
_SHARED = ("mlp.shared_experts", "mlp.shared_expert")
_EXPERTS: _Names = {
    "experts": (("mlp.experts",),),
    "router": (("mlp.gate",), ("mlp.router",)),
    "shared.gate_up": (*((f"{name}.gate_proj", f"{name}.up_proj") for name in _SHARED), ()),
    "shared.down": (*((f"{name}.down_proj",) for name in _SHARED), ()),
    "shared_gate": (("mlp.shared_expert_gate",), ()),
}
_BESIDE_MLP: _Names = {
    **_MLP,
    "experts": (("experts",),),
    "router": (("router",),),
    "mlp_out": (("post_feedforward_layernorm_1",),),
    "experts_in": (("pre_feedforward_layernorm_2",),),
    "experts_out": (("post_feedforward_layernorm_2",),),
}
_SCALE = "layer_scalar"  # of what a layer returns
_ACTIVATIONS = ("act_fn", "activation_fn")
_EPS = ("variance_epsilon", "eps")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of a norm


def modules_of(layer: Any) -> Modules:
    """Raises Unfit if it has other weights as well."""
    by_name = {**dict(layer.named_modules()), **dict(layer.named_parameters())}
    mixer = next((names for name, names in _KEEPS_STATES.items() if name in by_name), _ATTENTION)
    modules: dict[str, list[Any]] = {}
    with_experts = {"mlp.experts": _EXPERTS, "experts": _BESIDE_MLP}
    mlp = next((with_experts[name] for name in with_experts if name in by_name), _MLP)
    for name, choices in {**_NORMS, **mixer, **mlp}.items():
        names = next((names for names in choices if all(part in by_name for part in names)), None)
        if names is None:
            raise Unfit(f"its layers have no {' or '.join(names[0] for names in choices)}")
        modules[name] = [by_name[part] for part in names]
    ours = [part for parts in modules.values() for part in parts]
    ids = {id(tensor) for part in ours for tensor in _tensors(part)}
    for name, tensor in named_weights(layer):
        if id(tensor) not in ids and not name.endswith(("inv_freq", _SCALE)):
            raise Unfit(f"its layers have {name}, which ours have not")
    for one, other in (("q_norm", "k_norm"), ("attention_sum", "mlp_sum")):
        if bool(modules.get(one)) != bool(modules.get(other)):
            raise Unfit(f"its layers have {one} or {other}, not both")
    return modules


def keeps_states(layer: Any) -> bool:
    return any(hasattr(layer, name) for name in _KEEPS_STATES)


def _tensors(part: Any) -> Iterable[Tensor]:
    return (part,) if isinstance(part, Tensor) else (tensor for _, tensor in named_weights(part))


def has_gelu(layer: Any) -> bool:
    """What its MLPs activate by, as far as it says so: the proof finds the rest."""
    x = torch.linspace(-6, 6, 49)
    curves = {False: F.silu(x), True: F.gelu(x, approximate="tanh")}
    kinds = set[bool]()
    for module in layer.modules():
        act = next((act for name in _ACTIVATIONS if (act := getattr(module, name, None))), None)
        if act is None:
            continue
        same = [kind for kind, rows in curves.items() if torch.allclose(act(x), rows, atol=1e-6)]
        if not same:
            raise Unfit(f"its MLPs activate by {type(act).__name__}, ours by SiLU or by GELU's tanh")
        kinds.update(same)
    if len(kinds) > 1:
        raise Unfit("its MLPs activate in two ways")
    return True in kinds


def scale_of(layer: Any) -> float:
    return float(getattr(layer, _SCALE, 1.0))


def has_bias(layers: Sequence[Modules], *names: str) -> bool:
    return any(part.bias is not None for layer in layers for name in names for part in layer.get(name, ()))


def check_shapes(name: str, ours: Linear, theirs: Sequence[Any], parts: Sequence[int]) -> None:
    """`parts`: rows of each, where a tensor of theirs has no more than one."""
    if not all(is_matrix(part) and dtype_of(part) == ours.weight.dtype for part in theirs):
        raise Unfit(f"its {name} is more than a matrix")
    if ours.bias is None and any(part.bias is not None for part in theirs):
        raise Unfit(f"its {name} has a bias")
    rows = [part.out_features for part in theirs]
    if theirs[0].in_features != ours.inputs or rows not in (list(parts), [sum(parts)]):
        raise Unfit(f"its {name} has other sizes than its config tells of")


def linear_of(theirs: Sequence[Any]) -> Linear:
    """One of ours for these, side by side."""
    params = Parameters(dtype_of(theirs[0]), torch.device("meta"))
    bias = any(part.bias is not None for part in theirs)
    ours = Linear(params, theirs[0].in_features, sum(part.out_features for part in theirs), bias=bias)
    share(ours, theirs)
    return ours


def share(ours: Linear, theirs: Sequence[Any]) -> None:
    """Their originals are given up, one after the other. Those that are not stored alike are dequantised."""
    rows = [part.out_features for part in theirs]
    stored = side_by_side(theirs)
    if stored is not None:
        ours.hold(stored.weight, stored.scales)
        for part, of_part in zip(theirs, stored.rows(rows), strict=True):
            keep(part, "weight", of_part)
    else:
        _share_plain(ours, theirs, rows)
    if ours.bias is not None:
        zeros = torch.split(ours.weight.new_zeros(sum(rows), dtype=dtype_of(theirs[0])), rows)
        pairs = zip(theirs, zeros, strict=True)
        ours.bias = torch.cat([none if part.bias is None else part.bias.data for part, none in pairs])


def _share_plain(ours: Linear, theirs: Sequence[Any], rows: Sequence[int]) -> None:
    for part in theirs:
        restore(part)
    ours.hold(theirs[0].weight.data)
    if len(theirs) > 1:
        ours.hold(torch.cat([part.weight.data for part in theirs]))
        for part, own in zip(theirs, torch.split(ours.weight, list(rows)), strict=True):
            part.weight.data = own


def eps_of(norm: Any) -> float:
    return float(next(getattr(norm, name) for name in _EPS if hasattr(norm, name)))


def set_norm(ours: RMSNorm, theirs: Any) -> None:
    weight = theirs.weight.data
    ours.eps = eps_of(theirs)
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected = theirs(x)
    tolerance = _TOLERANCE[weight.dtype]
    for candidate in (weight, 1 + weight.float()):
        normed = F.rms_norm(x.float(), weight.shape, candidate.float(), ours.eps).to(x.dtype)
        if weight.shape == ours.weight.shape and torch.allclose(normed, expected, tolerance, tolerance):
            ours.weight = candidate.to(torch.promote_types(candidate.dtype, ours.weight.dtype))
            return
    raise Unfit(f"its {type(theirs).__name__} is no RMS norm like ours")
