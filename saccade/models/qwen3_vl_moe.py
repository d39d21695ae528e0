"""Qwen3-VL with experts in its decoder."""

from __future__ import annotations

from saccade.models.families.qwen3_vl import Qwen3VL
from saccade.models.layers.moe import WHY_PLAIN


class Qwen3VLMoe(Qwen3VL):
    why_plain = WHY_PLAIN
