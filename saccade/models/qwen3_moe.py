"""Qwen3 with experts, without a vision tower."""

from __future__ import annotations

from saccade.models.families.text import Text
from saccade.models.layers.moe import WHY_PLAIN


class Qwen3Moe(Text):
    why_plain = WHY_PLAIN
