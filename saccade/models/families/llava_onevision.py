"""LLaVA-OneVision: LLaVA-NeXT with a SigLIP tower, whose embeddings are interpolated down to a limit."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from saccade.models.families.llava_next import LlavaNext
from saccade.types.media import Size


class LlavaOnevision(LlavaNext):
    def reduce(self, rows: Tensor, size: Size) -> Tensor:
        if rows.shape[:2] == (size.height, size.width):
            return rows
        channel_first = rows.permute(2, 0, 1)[None]  # [1, hidden, rows, columns]
        reduced = F.interpolate(channel_first, (size.height, size.width), mode="bilinear")
        return reduced[0].permute(1, 2, 0)
