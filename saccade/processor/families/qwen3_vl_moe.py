"""Qwen3-VL with experts: pictures as in Qwen3-VL."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.processor.families.qwen3_vl import Qwen3VL


@dataclass(frozen=True, slots=True)
class Qwen3VLMoe(Qwen3VL):
    pass
