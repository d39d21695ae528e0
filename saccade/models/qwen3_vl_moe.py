"""Qwen3-VL with experts in its decoder."""

from __future__ import annotations

from saccade.models.families.qwen3_vl import Qwen3VL
from saccade.models.layers.moe import EAGER_REASON


class Qwen3VLMoe(Qwen3VL):
    eager_reason = EAGER_REASON
