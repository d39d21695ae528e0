"""Attention that is more than causal, against what a rule says of each pair of tokens; in one window and in several."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from saccade.models.layers.attention_rules import AttentionRule, rule_attention
from saccade.models.layers.torch_attention import AttentionBatch

BLOCK, TOKENS, HEADS, KV_HEADS, DIM = 4, 23, 4, 2, 8
SCALE = 0.3
PROMPT = 14
_ROW = [0, 1, 2, 2, 2, 2, 2, 7, 8, 9, 10, 10, 10, 13, *range(14, TOKENS)]  # pictures at 2 to 6 and 10 to 12
BLOCKS = torch.tensor(_ROW)
PROMPTS = [PROMPT] * TOKENS


def in_block(query: int, key: int) -> bool:
    return _ROW[query] == _ROW[key]


RULES: dict[str, tuple[AttentionRule, Callable[[int, int], bool]]] = {
    "window": (AttentionRule(window=5), lambda q, k: q - 5 < k <= q),
    "chunk": (AttentionRule(chunk=6), lambda q, k: k <= q and k // 6 == q // 6),
    "blocks": (AttentionRule(blocks=BLOCKS), lambda q, k: k <= q or in_block(q, k)),
    "blocks within a window": (
        AttentionRule(blocks=BLOCKS, window=3),
        lambda q, k: (k <= q or in_block(q, k)) and k > q - 3,
    ),
    "blocks beyond a window": (
        AttentionRule(blocks=BLOCKS, window=3, is_block_whole=True),
        lambda q, k: q - 3 < k <= q or in_block(q, k),
    ),
    "a window of the answer": (
        AttentionRule(prompts=PROMPTS, window=4),
        lambda q, k: k <= q and (k < PROMPT or k > q - 4),
    ),
    "a soft cap": (AttentionRule(softcap=0.7), lambda q, k: k <= q),
    "sinks": (AttentionRule(sinks=torch.linspace(-1, 2, HEADS)), lambda q, k: k <= q),
}
CUTS = {"whole": (TOKENS,), "in pieces": (2, 9, 18, 19, TOKENS)}  # between pictures, and within the answer


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", RULES)
def test_each_query_attends_to_what_its_rule_lets_it_see(name: str, cuts: tuple[int, ...]) -> None:
    rule, sees = RULES[name]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    k, v = (torch.randn(2 * TOKENS, KV_HEADS, DIM, generator=generator) for _ in range(2))
    found = [piece(rule, q, k, v, start, end) for start, end in zip((0, *cuts), cuts, strict=False)]
    expected = torch.stack([one(rule, sees, q, k, v, query) for query in range(TOKENS)])
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)


def piece(rule: AttentionRule, q: Tensor, k: Tensor, v: Tensor, start: int, end: int) -> Tensor:
    """A window of the request, whose first block is the cache's second."""
    blocks = torch.arange(1, -(-TOKENS // BLOCK) + 1)[None]
    batch = AttentionBatch([end - start], [end], blocks, torch.arange(start, end) + BLOCK, BLOCK)
    rows = rule._replace(
        blocks=None if rule.blocks is None else rule.blocks[start:end],
        prompts=None if rule.prompts is None else rule.prompts[start:end],
    )
    return rule_attention(q[start:end], k, v, batch, SCALE, rows)


def one(rule: AttentionRule, sees: Callable[[int, int], bool], q: Tensor, k: Tensor, v: Tensor, query: int) -> Tensor:
    """[heads, d], by the definition of attention."""
    keys = torch.tensor([key for key in range(TOKENS) if sees(query, key)]) + BLOCK
    outputs = []
    for head in range(HEADS):
        group = head * KV_HEADS // HEADS
        scores = (k[keys, group] @ q[query, head]) * SCALE
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        weights = scores.exp()
        sink = 0.0 if rule.sinks is None else math.exp(float(rule.sinks[head]))
        outputs.append((weights[:, None] * v[keys, group]).sum(0) / (weights.sum() + sink))
    return torch.stack(outputs)
