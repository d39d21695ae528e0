"""The MoE config: experts and routing of a decoder, read from config.json. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
        return self.shared // self.width if self.stacks_shared and self.shared % self.width == 0 else 0

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
    width = int(text["moe_intermediate_size"])
    choice = text.get("topk_method") or "greedy"
    choice = "greedy" if choice == "gready" else choice  # a typo in DeepSeek's config class
    is_grouped = choice != "greedy"
    per_token = int(text.get("num_experts_per_tok") or 0)
    shared = first_of(text, "shared_expert_intermediate_size")
    # With one expert per token DeepSeek keeps its score as weight, while Qwen normalises it to one.
    is_one_kept = per_token == 1 and text.get("n_routed_experts") is not None
    return MoEConfig(
        layers=layers,
        count=int(count),
        per_token=per_token,
        width=width,
        normalise=bool(text.get("norm_topk_prob", False)) and not is_one_kept,
        scoring=text.get("scoring_func") or "softmax",
        groups=int(text.get("n_group") or 1) if is_grouped else 1,
        groups_kept=int(text.get("topk_group") or 1) if is_grouped else 1,
        choice=choice,
        scale=float(text.get("routed_scaling_factor") or 1.0),
        shared=int(shared) if shared is not None else int(text.get("n_shared_experts") or 0) * width,
        shared_gate=bool(shared),
    )


def _layers(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Every n-th layer, without the dense ones. Qwen's step counts from one, DeepSeek's from zero."""
    dense = text.get("mlp_only_layers") or ()
    first = int(text.get("first_k_dense_replace") or 0)
    step = int(text.get("decoder_sparse_step") or 1)
    frequency = int(text.get("moe_layer_freq") or 1)
    layers = [i for i in range(first, num_layers) if i not in dense]
    return tuple(i for i in layers if (i + 1) % step == 0 and i % frequency == 0)


def first_of(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[n] for n in names if values.get(n) is not None), None)
