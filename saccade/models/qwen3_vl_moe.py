"""Qwen3-VL with experts in its decoder."""

from __future__ import annotations

from saccade.models.experts import WHY_PLAIN
from saccade.models.qwen3_vl import Qwen3VL


class Qwen3VLMoe(Qwen3VL):
    why_plain = WHY_PLAIN
