"""dots.ocr: pictures of any size, rounded as Qwen2-VL rounds them; sequential RoPE positions."""

from __future__ import annotations

from saccade.processor.families import base
from saccade.processor.families.qwen2_vl import Qwen2VL


class DotsOCR(Qwen2VL):
    __slots__ = ()

    positions = base.sequential_positions
