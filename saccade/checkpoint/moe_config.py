"""The MoE config: experts and routing of a decoder, read from config.json. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.checkpoint.settings import setting


@dataclass(frozen=True, slots=True)
class MoEConfig:
    layers: tuple[int, ...]  # indices of the MoE layers
    count: int
    per_token: int  # top-k
    width: int  # intermediate size of an expert
    normalise: bool = False  # norm_topk_prob: the weights of a token's experts add up to one
    scoring: str = "softmax"  # or "sigmoid"
    groups: int = 1  # n_group
    groups_kept: int = 1  # topk_group: groups that a token's experts are chosen from
    choice: str = "greedy"  # topk_method
    scale: float = 1.0  # routed_scaling_factor
    shared: int = 0  # intermediate size of the shared expert; 0: there is none
    shared_gate: bool = False  # the shared expert's output has a gate per token
    stacks_shared: bool = True  # it may be stacked with the routed ones

    @property
    def has_bias(self) -> bool:
        """A bias on the scores that selects experts but does not enter their weights."""
        return self.choice == "noaux_tc"

    @property
    def stacked_shared(self) -> int:
        """Routed experts that are as wide as the shared one: kernels run it as so many more of them."""
        if not self.stacks_shared or self.shared % self.width:
            return 0
        return self.shared // self.width

    @property
    def active_width(self) -> int:
        """Intermediate size of all experts of one token together."""
        return self.per_token * self.width + self.shared

    @property
    def total_width(self) -> int:
        """Intermediate size of all experts together."""
        return self.count * self.width + self.shared


def moe_config(text: Mapping[str, Any], num_layers: int) -> MoEConfig | None:
    """Read the field names of Qwen and of DeepSeek; None for a dense model."""
    count = first_of(text, "num_experts", "num_local_experts", "n_routed_experts")
    layers = _layers(text, num_layers)
    if not count or not layers or text.get("moe_intermediate_size") is None:
        return None
    width = text["moe_intermediate_size"]
    choice = setting(text, "topk_method", "greedy")
    choice = choice.replace("gready", "greedy")  # a typo in DeepSeek's config class
    groups = {} if choice == "greedy" else text
    per_token = text.get("num_experts_per_tok", 0)
    shared = text.get("shared_expert_intermediate_size", text.get("n_shared_experts", 0) * width)
    # With one expert per token DeepSeek keeps its score as weight, while Qwen normalises it to one.
    is_one_kept = per_token == 1 and text.get("n_routed_experts") is not None
    return MoEConfig(
        layers=layers,
        count=count,
        per_token=per_token,
        width=width,
        normalise=bool(text.get("norm_topk_prob", False)) and not is_one_kept,
        scoring=setting(text, "scoring_func", "softmax"),
        groups=max(1, groups.get("n_group", 1)),
        groups_kept=max(1, groups.get("topk_group", 1)),
        choice=choice,
        scale=float(text.get("routed_scaling_factor", 1.0)),
        shared=shared,
        shared_gate=bool(text.get("shared_expert_intermediate_size")),
    )


def _layers(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Every n-th layer, without the dense ones. Qwen's step counts from one, DeepSeek's from zero."""
    dense = text.get("mlp_only_layers", ())
    step = max(1, text.get("decoder_sparse_step", 1))
    frequency = max(1, text.get("moe_layer_freq", 1))
    layers = [i for i in range(text.get("first_k_dense_replace", 0), num_layers) if i not in dense]
    return tuple(i for i in layers if (i + 1) % step == i % frequency == 0)


def first_of(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[n] for n in names if values.get(n) is not None), None)
