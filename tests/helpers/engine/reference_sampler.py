"""What `saccade/runner/sampler.py` does, for one row in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from saccade.runner.sampler import Row, uniform

_NEVER = float("-inf")


def reference_sample(logits: Sequence[float], row: Row) -> int:
    """The token of one row, step by step."""
    params = row.params
    values = list(logits)
    outputs = row.output_ids.tolist()
    prompts = row.prompt_ids.tolist()
    for token in set(outputs) | set(prompts):
        values[token] *= params.repetition_penalty if values[token] <= 0 else 1 / params.repetition_penalty
    for token in set(outputs):
        values[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    if len(outputs) < params.min_tokens:
        for token in row.end_ids:
            values[token] = _NEVER
    for token in row.forbidden:
        values[token] = _NEVER
    if (bits := row.allowed) is not None:
        allowed = {t for t in range(min(len(values), len(bits) * 32)) if bits[t // 32] >> (t % 32) & 1}
        values = [v if t in allowed else _NEVER for t, v in enumerate(values)]
    ranked = sorted(range(len(values)), key=lambda t: -values[t])
    if params.is_greedy:
        return ranked[0]
    ranked = ranked[: params.top_k] if params.top_k > 0 else ranked
    weights = [math.exp((values[t] - values[ranked[0]]) / params.temperature) for t in ranked]
    probs = [w / sum(weights) for w in weights]
    last = [t for i, t in enumerate(ranked) if sum(probs[:i]) < params.top_p][-1]
    likely = [t for t, v in enumerate(values) if v >= values[last]]  # also those as likely as the last
    odds = {t: math.exp((values[t] - values[ranked[0]]) / params.temperature) for t in likely}
    kept = {t: odd for t, odd in odds.items() if odd >= params.min_p}
    target = uniform(row.seed, len(outputs)) * sum(kept.values())
    running = 0.0
    for token in sorted(kept):
        running += kept[token]
        if running > target:
            return token
    return max(kept)
