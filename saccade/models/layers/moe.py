"""MoE: routed experts in place of a decoder layer's MLP.

tokens      a b c        top-2 experts: a 2 0, b 0 1, c 2 0
by expert   a b c | b | a c      one GEMM for each expert that has tokens
by token    a a | b b | c c      weighted sum
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.checkpoint.moe_config import MoEConfig
from saccade.errors import ConfigError
from saccade.models import int4_weights
from saccade.models.fp8_weights import dequantized
from saccade.models.int4_weights import GroupScales
from saccade.models.layers.activation import gate_and_mul
from saccade.models.layers.mlp import GatedMLP
from saccade.models.state_dict import Parameters, Scales
from saccade.models.weights import Rule

_CHOICES = ("greedy", "group_limited_greedy", "noaux_tc")
_SHARED_NAMES = {"gate": "gate_up.gate", "up": "gate_up.up", "down": "down"}
_TINY = 1e-20  # against division by zero


def _are_alike(params: Parameters) -> bool:
    """Whether the shared expert can be one tensor with others that stay quantised, or these do not."""
    for names in (("gate", "up"), ("down",)):
        routed = [f"0.{name}.weight" for name in names]
        shared = [f"shared.{_SHARED_NAMES[name]}.0.weight" for name in names]
        if any(params.is_kept(name) for name in routed) and not params.are_kept_alike(*routed, *shared):
            return False
    return True


class MoE:
    def __init__(self, params: Parameters, hidden: int, rules: MoEConfig) -> None:
        _check(rules)
        if not _are_alike(params):
            rules = replace(rules, stacks_shared=False)
        self.rules = rules
        self.dtype = params.dtype  # of tokens
        self.gelu = False  # by tanh, in place of SiLU
        self.expert_scales: Tensor | None = None  # float32 [E]: of the weights of tokens' experts
        count = rules.count
        # In float32 for any dtype, because close scores decide between experts.
        self.routers = _float32(params, count + rules.shared_gate, hidden)  # the shared expert's gate is last
        params.add("router.weight", self.routers[:count])
        self.router_bias = _float32(params, count) if rules.has_bias else None
        if self.router_bias is not None:
            params.add("router.bias", self.router_bias)
        stacked = count + rules.stacked_shared
        width = rules.width
        parts = dict.fromkeys(self._names("gate", "up"), width)  # [E, 2 I, H], gates first
        self.gate_up, self.gate_up_scales = params.empty_weight(parts, stacked, 2 * width, hidden)
        parts = dict.fromkeys(self._names("down"), hidden)  # [E, H, I]
        self.down, self.down_scales = params.empty_weight(parts, stacked, hidden, width)
        self._name_experts(params)
        self.shared = None  # of another width: it runs by itself
        if rules.stacked_shared:
            self._name_shared(params.within("shared"))
        elif rules.shared:
            self.shared = GatedMLP(params.within("shared"), hidden, rules.shared)
        if rules.shared_gate:
            params.add("shared_gate.weight", self.routers[count:])

    def _name_experts(self, params: Parameters) -> None:
        """Register each expert's weights, and the stacked tensors that a checkpoint may have instead."""
        count = self.rules.count
        for name, (tensors, scales) in self._parts().items():
            for expert in range(count):
                params.add(f"{expert}.{name}.weight", tensors[expert], _at(scales, expert))
        wholes = {"gate_up": (self.gate_up, self.gate_up_scales), "down": (self.down, self.down_scales)}
        for whole, (tensors, scales) in wholes.items():
            names = whole.split("_")
            parts = [f"{expert}.{name}.weight" for name in names for expert in range(count)]
            params.add_whole(whole, tensors[:count], parts, _at(scales, slice(count)))

    def _parts(self) -> dict[str, tuple[Tensor, Scales | None]]:
        """Gates, ups and downs of all experts, with their scales if they are quantised."""
        gates, ups = self.gate_up.chunk(2, dim=1)
        of_gates, of_ups = _halves(self.gate_up_scales)
        return {"gate": (gates, of_gates), "up": (ups, of_ups), "down": (self.down, self.down_scales)}

    def _names(self, *kinds: str) -> list[str]:
        """Names of the parts of all experts, also of a shared one that is stacked with them."""
        rules = self.rules
        routed = [f"{expert}.{kind}.weight" for kind in kinds for expert in range(rules.count)]
        shared = [_SHARED_NAMES[kind] for kind in kinds]
        return routed + [
            f"shared.{name}.{part}.weight" for name in shared for part in range(rules.stacked_shared)
        ]

    def _name_shared(self, params: Parameters) -> None:
        """The parts of the shared expert that lie in the stacked tensors, and as a checkpoint has them."""
        first = self.rules.count
        for kind, (tensors, scales) in self._parts().items():
            name = _SHARED_NAMES[kind]
            parts = tensors[first:]
            of_parts = _at(scales, slice(first, None))
            names = [f"{name}.{part}.weight" for part in range(len(parts))]
            for part, part_name in enumerate(names):
                params.add(part_name, parts[part], _at(of_parts, part))
            params.add_whole(f"{name}.weight", parts, names, of_parts)

    def __call__(self, x: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]. `routed_by`: what the router reads, if not x."""
        weights, indices = self.route(x if routed_by is None else routed_by)
        # A small GEMM per token sums its experts in a fixed order, accumulated in float32.
        out = torch.bmm(weights.to(x.dtype)[:, None], self._run_experts(x, indices))[:, 0]
        if not self.rules.shared:
            return out
        common = self._run_shared(x) if self.shared is None else self.shared(x)
        if self.rules.shared_gate:
            common.mul_(F.linear(x.float(), self.routers[-1:]).sigmoid_())
        return out.add_(common)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts (float32) and their indices, both [T, per_token]."""
        rules = self.rules
        logits = F.linear(x.float(), self.routers[: rules.count])  # [T, E]
        scores = logits.softmax(-1) if rules.scoring == "softmax" else logits.sigmoid()
        selection = scores
        if self.router_bias is not None:
            selection = scores + self.router_bias
        if rules.groups > 1:
            selection = _mask_groups(selection, rules)
        indices = _largest(selection, rules.per_token)
        weights = scores.gather(1, indices)
        if rules.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[indices]
        return weights * rules.scale, indices

    def _run_experts(self, x: Tensor, indices: Tensor) -> Tensor:
        """Outputs of each token's experts: [T, per_token, H]."""
        experts = indices.flatten()
        order = experts.argsort(stable=True)
        rows = x[order // self.rules.per_token]  # [T * per_token, H], sorted by expert
        sizes = torch.bincount(experts, minlength=self.rules.count).tolist()
        for expert, part in enumerate(torch.split(rows, sizes)):
            if len(part):
                self._run_expert(part, expert)
        return rows[order.argsort()].view(*indices.shape, x.shape[-1])

    def _run_shared(self, x: Tensor) -> Tensor:
        """The shared expert, whose parts are the last experts: their outputs add up to its own."""
        common = torch.zeros_like(x)
        for expert in range(self.rules.count, len(self.down)):
            rows = x.clone()
            self._run_expert(rows, expert)
            common.add_(rows)
        return common

    def _run_expert(self, rows: Tensor, expert: int) -> None:
        """One expert over its tokens, in place. A method: its memory is free before the next one begins."""
        wide = F.linear(rows, _expert(self.gate_up, self.gate_up_scales, expert, rows.dtype))
        gated = gate_and_mul(wide, gelu=self.gelu)
        torch.mm(gated, _expert(self.down, self.down_scales, expert, rows.dtype).T, out=rows)


def _at(scales: Scales | None, where: Any) -> Any:
    """Those of some experts, by their index."""
    if isinstance(scales, GroupScales):
        return scales.at(where)
    return None if scales is None else scales[where]


def scales_and_zeros(scales: Scales | None) -> tuple[Tensor | None, Tensor | None]:
    """What kernels take. Zero points are of INT4."""
    if isinstance(scales, GroupScales):
        return scales.scales, scales.zeros
    return scales, None


def _halves(scales: Scales | None) -> tuple[Scales | None, Scales | None]:
    """Scales of gates and of ups."""
    if scales is None:
        return None, None
    rows = (scales.scales if isinstance(scales, GroupScales) else scales).shape[1]
    every = slice(None)
    return _at(scales, (every, slice(rows // 2))), _at(scales, (every, slice(rows // 2, None)))


def _expert(weights: Tensor, scales: Scales | None, expert: int, dtype: torch.dtype) -> Tensor:
    if isinstance(scales, GroupScales):
        return int4_weights.dequantized(weights[expert], scales.at(expert), dtype)
    if scales is None:
        return weights[expert]
    return dequantized(weights[expert], scales[expert], dtype)


def layer_mlp(params: Parameters, text: TextConfig, index: int, *, bias: bool = False) -> GatedMLP | MoE:
    """The MLP of layer `index`: its experts, if it has some."""
    if text.experts is not None and index in text.experts.layers:
        return MoE(params.within("experts"), text.hidden_size, text.experts)
    return GatedMLP(params, text.hidden_size, text.intermediate_size, bias=bias)


def _mask_groups(selection: Tensor, rules: MoEConfig) -> Tensor:
    """Mask experts outside the best groups. A group's score is its best expert, with a bias its best two."""
    grouped = selection.view(len(selection), rules.groups, -1)  # [T, groups, experts of a group]
    best = grouped.topk(1 + rules.has_bias, dim=-1).values.sum(-1)
    indices = _largest(best, rules.groups_kept)
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, indices, True)
    return grouped.masked_fill(~mask[..., None], float("-inf")).view_as(selection)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Their indices. Of equal scores the lowest index comes first, as in the kernels; `topk` takes any."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _float32(params: Parameters, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=params.device)


def _check(rules: MoEConfig) -> None:
    if rules.scoring not in ("softmax", "sigmoid"):
        raise ConfigError(f"config.json scores experts by {rules.scoring!r}; known are softmax, sigmoid")
    if rules.choice not in _CHOICES:
        names = ", ".join(_CHOICES)
        raise ConfigError(f"config.json chooses experts by topk_method={rules.choice!r}; known are {names}")
    if rules.width < 1 or rules.shared < 0:
        raise ConfigError(f"config.json has experts of width {rules.width} and {rules.shared} beside them")
    if rules.count % rules.groups or not 0 < rules.groups_kept <= rules.groups:
        groups = f"{rules.groups} groups and keeps {rules.groups_kept} of them"
        raise ConfigError(f"config.json cuts {rules.count} experts into {groups}")
    if rules.has_bias and 1 < rules.groups == rules.count:
        problem = "by their best two experts, but each has only one"
        raise ConfigError(f"config.json ranks {rules.groups} groups {problem}")
    within_reach = rules.count // rules.groups * rules.groups_kept
    if not 0 < rules.per_token <= within_reach:
        experts = f"{rules.per_token} of {within_reach} experts"
        raise ConfigError(f"config.json sends a token to {experts} (num_experts_per_tok)")


EXPERT_RULES = (  # under a layer's prefix
    Rule("mlp.gate.weight", "experts.router.weight"),
    Rule("mlp.gate.e_score_correction_bias", "experts.router.bias"),
    Rule("mlp.experts.{}.gate_proj.weight", "experts.{}.gate.weight"),
    Rule("mlp.experts.{}.up_proj.weight", "experts.{}.up.weight"),
    Rule("mlp.experts.{}.down_proj.weight", "experts.{}.down.weight"),
    *(Rule(f"mlp.experts.{part}_proj", f"experts.{part}") for part in ("gate_up", "down")),
    *(
        Rule(f"mlp.{shared}.{part}_proj.weight", f"experts.shared.{ours}.weight")
        for shared in ("shared_expert", "shared_experts")
        for part, ours in {"gate": "gate_up.gate", "up": "gate_up.up", "down": "down"}.items()
    ),
    Rule("mlp.shared_expert_gate.weight", "experts.shared_gate.weight"),
)
