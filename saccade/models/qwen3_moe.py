"""Qwen3 with experts, without a vision tower."""

from __future__ import annotations

from saccade.models.families.text import Text
from saccade.models.layers.moe import EAGER_REASON


class Qwen3Moe(Text):
    eager_reason = EAGER_REASON
