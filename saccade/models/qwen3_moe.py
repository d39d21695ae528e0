"""Qwen3 with experts, without a vision tower."""

from __future__ import annotations

from saccade.models.experts import WHY_PLAIN
from saccade.models.text import Text


class Qwen3Moe(Text):
    why_plain = WHY_PLAIN
