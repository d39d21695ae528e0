"""Qwen3.5 with experts in its decoder; one MLP beside them every token goes through."""

from __future__ import annotations

from saccade.models.families.qwen3_5 import Qwen3_5
from saccade.models.layers.moe import EAGER_REASON


class Qwen3_5Moe(Qwen3_5):
    eager_reason = f"{Qwen3_5.eager_reason}, and {EAGER_REASON}"
