"""Qwen2.5-VL: what a picture costs and where its tokens stand is as in Qwen2-VL; only the tower differs."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.processor.families.qwen2_vl import Qwen2VL


@dataclass(frozen=True, slots=True)
class Qwen2_5VL(Qwen2VL):
    pass
