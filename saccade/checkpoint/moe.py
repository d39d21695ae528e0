"""How a decoder with experts sends tokens to them, as config.json says it. Pure data: knows no tensors and no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MoEConfig:
    layers: tuple[int, ...]  # those that have experts in place of one MLP
    count: int
    per_token: int
    width: int  # of an expert's MLP
    normalise: bool = False  # the weights of a token's experts add up to one
    scoring: str = "softmax"  # or "sigmoid"
    groups: int = 1  # that the experts are divided into, neighbours together
    groups_kept: int = 1  # a token's experts come from these
    choice: str = "greedy"  # the config's word for how experts are chosen
    scale: float = 1.0  # of the weights
    shared: int = 0  # width of the MLP that every token goes through as well; 0: there is none
    shared_gate: bool = False  # what comes out of that one is weighted by token

    @property
    def has_bias(self) -> bool:
        """On the scores, when experts are chosen; weights do not see it."""
        return self.choice == "noaux_tc"

    @property
    def active_width(self) -> int:
        """Of all MLPs that one token goes through, side by side."""
        return self.per_token * self.width + self.shared

    @property
    def total_width(self) -> int:
        """Of all that lie in memory."""
        return self.count * self.width + self.shared


def moe_config(text: Mapping[str, Any], num_layers: int) -> MoEConfig | None:
    """Read the words of the Qwen line and those of the DeepSeek line; None where a model has no experts."""
    count = first_of(text, "num_experts", "num_local_experts", "n_routed_experts")
    layers = _layers(text, num_layers)
    if not count or not layers or text.get("moe_intermediate_size") is None:
        return None
    width, choice = int(text["moe_intermediate_size"]), text.get("topk_method") or "greedy"
    choice = "greedy" if choice == "gready" else choice  # as the DeepSeek line's config class has it
    is_grouped, per_token = choice != "greedy", int(text.get("num_experts_per_tok") or 0)
    shared = first_of(text, "shared_expert_intermediate_size")
    # In the DeepSeek line the only expert of a token keeps its score, in the Qwen line its weight is then one.
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
    """Every so many layers, without those that are named as plain and the first few."""
    plain, first = text.get("mlp_only_layers") or (), int(text.get("first_k_dense_replace") or 0)
    every, rhythm = int(text.get("decoder_sparse_step") or 1), int(text.get("moe_layer_freq") or 1)
    numbers = (i for i in range(first, num_layers) if i not in plain)
    # The two lines count differently: one from one, the other from zero.
    return tuple(i for i in numbers if (i + 1) % every == 0 and i % rhythm == 0)


def first_of(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[n] for n in names if values.get(n) is not None), None)
