"""Routed experts: against Transformers' blocks, however tokens are batched, in every layout a checkpoint may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from saccade import costs
from saccade.checkpoint import moe_config
from saccade.checkpoint.config import model_config
from saccade.checkpoint.moe_config import MoEConfig
from saccade.errors import ConfigError
from saccade.models.layers.moe import EXPERT_RULES, MoE
from saccade.models.state_dict import Parameters
from saccade.models.tensor_files import TensorFiles
from saccade.models.weights import fill_random, load_weights
from tests.helpers.kernels.allocations import PeakMemory

pytestmark = pytest.mark.transformers

HIDDEN = 24
RULES = MoEConfig(layers=(0,), count=8, per_token=3, width=10)
QWEN = {"hidden_size": HIDDEN, "moe_intermediate_size": 10, "num_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK = {
    "num_attention_heads": 2,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
SHAPE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "intermediate_size": 8,
    **QWEN,
    "norm_topk_prob": True,
}
V3 = {**DEEPSEEK, "norm_topk_prob": True}
V3_WORDS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # that V3's class takes for granted
BLOCKS: Mapping[str, tuple[type[Any], Any, dict[str, Any]]] = {
    "plain": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**QWEN), QWEN),
    "normalised": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(**QWEN, norm_topk_prob=True),
        {**QWEN, "norm_topk_prob": True},
    ),
    "a shared expert behind a gate": (
        Qwen3_5MoeSparseMoeBlock,
        Qwen3_5MoeTextConfig(**QWEN, shared_expert_intermediate_size=14),
        {**QWEN, "norm_topk_prob": True, "shared_expert_intermediate_size": 14},
    ),
    "shared experts": (
        DeepseekV2Moe,
        DeepseekV2Config(**DEEPSEEK, topk_method="greedy"),
        {**DEEPSEEK, "topk_method": "greedy"},
    ),
    "from the best groups": (
        DeepseekV2Moe,
        DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy"),
        {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    ),
    "sigmoid scores with a bias": (DeepseekV3MoE, DeepseekV3Config(**V3), {**V3, **V3_WORDS}),
}


def built(rules: MoEConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[MoE, Parameters]:
    params = Parameters(dtype, torch.device("cpu"))
    experts = MoE(params.within("experts"), HIDDEN, rules)
    fill_random(params.targets, seed)
    return experts, params


def tokens(count: int = 40, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def rules_of(text: Mapping[str, Any]) -> MoEConfig:
    rules = moe_config.moe_config(text, num_layers=2)
    assert rules is not None
    return rules


def randomise(block: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.05 * noise.abs() if "bias" in name else noise * tensor.shape[-1] ** -0.5)


# --- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCKS)
def test_the_experts_compute_what_transformers_own_block_does(name: str, tmp_path: Path) -> None:
    kind, config, text = BLOCKS[name]
    block = kind(config).eval()
    randomise(block)
    save_file(
        {f"mlp.{key}": value.contiguous() for key, value in block.state_dict().items()}, tmp_path / "model.safetensors"
    )
    experts, params = built(rules_of(text))
    load_weights(TensorFiles(tmp_path), params.targets, EXPERT_RULES, progress=False, wholes=params.wholes)
    with torch.no_grad():
        expected = block(tokens()[None])[0]
    assert torch.allclose(experts(tokens()), expected, rtol=1e-5, atol=1e-5)


def test_a_token_gets_the_same_however_it_is_batched() -> None:
    experts, _ = built(replace(RULES, shared=6, shared_gate=True))
    x = tokens(30)
    alone = torch.cat([experts(row[None]) for row in x])
    in_parts = torch.cat([experts(part) for part in torch.split(x, [7, 1, 22])])
    assert torch.allclose(experts(x), alone, atol=1e-6)
    assert torch.allclose(in_parts, alone, atol=1e-6)


def test_what_comes_in_is_left_alone() -> None:
    experts, _ = built(replace(RULES, shared=6))
    x = tokens()
    experts(x)
    assert torch.equal(x, tokens())


def test_all_tokens_may_go_to_the_same_experts() -> None:
    experts, _ = built(RULES)
    x = tokens(1).expand(9, -1).contiguous()
    assert torch.allclose(experts(x), experts(x[:1]).expand(9, -1), atol=1e-6)


def test_scores_are_computed_in_float32_whatever_type_the_model_has() -> None:
    experts, _ = built(RULES, torch.bfloat16)
    weights, chosen = experts.route(tokens().bfloat16())
    assert experts.routers.dtype == weights.dtype == torch.float32
    assert experts(tokens().bfloat16()).dtype == torch.bfloat16
    exact = (tokens().bfloat16().double() @ experts.routers.double().T).softmax(-1)
    assert torch.equal(exact.topk(3).indices, chosen)


def test_a_bias_chooses_experts_and_does_not_weigh_them() -> None:
    experts, _ = built(replace(RULES, scoring="sigmoid", choice="noaux_tc"))
    assert experts.router_bias is not None
    experts.router_bias[5] = 100
    weights, chosen = experts.route(tokens())
    assert (chosen[:, 0] == 5).all()
    assert (weights <= 1).all()


def test_no_tokens_are_no_work() -> None:
    experts, _ = built(replace(RULES, shared=6))
    assert experts(tokens(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("of", ["num_experts", "n_routed_experts"])
def test_the_only_expert_of_a_token_has_its_score_as_weight_in_one_line_and_one_in_the_other(of: str) -> None:
    text = {"moe_intermediate_size": 10, of: 8, "num_experts_per_tok": 1, "norm_topk_prob": True}
    experts, _ = built(rules_of(text))
    weights, chosen = experts.route(tokens())
    scores = (tokens() @ experts.routers.T).softmax(-1).gather(1, chosen)
    assert torch.allclose(weights, torch.ones_like(scores) if of == "num_experts" else scores)


def test_a_config_that_does_not_say_how_many_experts_a_token_has_is_refused() -> None:
    text = {name: value for name, value in QWEN.items() if name != "num_experts_per_tok"}
    with pytest.raises(ConfigError, match="0 of 8 experts"):
        built(rules_of(text))


def test_random_experts_keep_a_token_alive() -> None:
    """`load_format="dummy"`: an expert's matrix is scaled by its own inputs, not by those of all experts."""
    experts, _ = built(replace(RULES, normalise=True))
    assert 0.05 < experts(tokens(200)).std() < 2


@pytest.mark.parametrize("sizes", [{"hidden_size": 600}, {"moe_intermediate_size": 900}], ids=str)
def test_a_step_takes_the_memory_that_is_planned_for_it(sizes: dict[str, int]) -> None:
    """Sizes that hide what is counted by token: scores, numbers, orders. All tokens go to the same experts."""
    text = model_config({**SHAPE, **sizes}).text
    assert text.experts is not None
    params, hidden = Parameters(torch.float32, torch.device("cpu")), text.hidden_size
    experts = MoE(params, hidden, text.experts)
    fill_random(params.targets, 0)
    x = torch.ones(64, hidden)
    with PeakMemory() as memory, torch.inference_mode():
        experts(x)
    outside = 2 * (text.num_heads + text.num_kv_heads + 1) * text.head_dim + text.embedding_size + 3 * hidden
    planned = len(x) * (costs.prompt_bytes_per_token(text, "float32") - 4 * outside)
    assert memory.peak == pytest.approx(planned, rel=0.1)


# --- layouts ------------------------------------------------------------------------------------------------------


def as_published(experts: MoE, layout: str) -> dict[str, Tensor]:
    gates, ups = experts.gate_up.chunk(2, dim=1)
    named = {"gate": gates, "up": ups, "down": experts.down}
    stored = {"mlp.gate.weight": experts.routers}
    if layout == "one by one":
        return stored | {
            f"mlp.experts.{i}.{name}_proj.weight": part[i].contiguous()
            for name, part in named.items()
            for i in range(8)
        }
    both = {"mlp.experts.gate_up_proj": experts.gate_up, "mlp.experts.down_proj": experts.down}
    return stored | {name: (t.mT if layout == "transposed" else t).contiguous() for name, t in both.items()}


@pytest.mark.parametrize("layout", ["one by one", "in one tensor", "transposed"])
def test_experts_are_read_in_every_published_layout(layout: str, tmp_path: Path) -> None:
    source, _ = built(RULES, seed=7)
    save_file(as_published(source, layout), tmp_path / "model.safetensors")
    experts, params = built(RULES)
    load_weights(TensorFiles(tmp_path), params.targets, EXPERT_RULES, progress=False, wholes=params.wholes)
    assert torch.equal(experts(tokens()), source(tokens()))


@pytest.mark.parametrize("shared", [0, 10, 30])
def test_all_names_of_a_checkpoint_are_views_of_the_two_tensors_that_are_used(shared: int) -> None:
    experts, params = built(replace(RULES, shared=shared))
    own = {experts.gate_up.untyped_storage().data_ptr(), experts.down.untyped_storage().data_ptr()}
    parts = [tensor for name, tensor in params.targets.items() if "router" not in name]
    assert {t.untyped_storage().data_ptr() for t in [*parts, *(w.tensor for w in params.wholes.values())]} == own
    assert sum(math.prod(t.shape) for t in parts) == experts.gate_up.numel() + experts.down.numel()


def test_one_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    source, _ = built(RULES)
    stored = as_published(source, "one by one")
    del stored["mlp.experts.6.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    _, params = built(RULES)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors .*mlp\.experts\.6\.up_proj\.weight"):
        load_weights(TensorFiles(tmp_path), params.targets, EXPERT_RULES, progress=False, wholes=params.wholes)


def test_experts_that_are_stored_twice_are_refused(tmp_path: Path) -> None:
    source, _ = built(RULES)
    twice = as_published(source, "one by one") | as_published(source, "in one tensor")
    save_file({name: tensor.clone() for name, tensor in twice.items()}, tmp_path / "model.safetensors")
    _, params = built(RULES)
    with pytest.raises(ConfigError, match="no place for"):
        load_weights(TensorFiles(tmp_path), params.targets, EXPERT_RULES, progress=False, wholes=params.wholes)


# --- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
    ],
)
def test_the_config_says_which_layers_have_experts(given: dict[str, Any], layers: tuple[int, ...]) -> None:
    rules = moe_config.moe_config({**QWEN, **given}, num_layers=6)
    assert rules is not None and rules.layers == layers


def test_a_published_misspelling_is_read_as_it_is_meant() -> None:
    rules = rules_of({**DEEPSEEK, "topk_method": "gready"})
    assert (rules.choice, rules.groups) == ("greedy", 1)


@pytest.mark.parametrize("given", [{}, {"num_experts": 0}, {"mlp_only_layers": [0, 1]}])
def test_a_config_without_experts_has_no_rules(given: dict[str, Any]) -> None:
    assert moe_config.moe_config({**QWEN, **given} if given else {"hidden_size": 8}, num_layers=2) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scoring": "tanh"}, "'tanh'; known are softmax, sigmoid"),
        ({"per_token": 9}, "9 of 8 experts"),
        ({"groups": 3}, "8 experts into 3 groups"),
        ({"groups": 4, "groups_kept": 5}, "keeps 5"),
        ({"groups": 4, "groups_kept": 1}, "3 of 2 experts"),
        ({"per_token": 0}, "0 of 8 experts"),
        ({"choice": "by lot"}, "'by lot'; known are greedy, group_limited_greedy, noaux_tc"),
        ({"choice": "noaux_tc", "groups": 8, "groups_kept": 4}, "8 groups by their best two"),
        ({"width": 0}, "width 0"),
        ({"shared": -4}, "-4 beside them"),
    ],
)
def test_rules_that_cannot_work_are_refused_with_their_numbers(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        built(replace(RULES, **change))


def test_an_empty_word_is_the_default() -> None:
    words = {"scoring_func": "", "topk_method": ""}
    assert moe_config.moe_config({**DEEPSEEK, **words}, 1) == moe_config.moe_config(DEEPSEEK, 1)
