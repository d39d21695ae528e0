"""Qwen3.5: pictures as in Qwen3-VL."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.processor.families.qwen3_vl import Qwen3VL


@dataclass(frozen=True, slots=True)
class Qwen3_5(Qwen3VL):
    pass
