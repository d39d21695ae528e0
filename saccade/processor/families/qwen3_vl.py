"""Qwen3-VL: the rules of Qwen2-VL with larger patches: a token is 32 x 32 pixels, and limits are edges of `size`."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.processor.families.qwen2_vl import Qwen2VL


@dataclass(frozen=True, slots=True)
class Qwen3VL(Qwen2VL):
    pass
