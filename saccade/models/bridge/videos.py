"""Videos for a model of Transformers: what its processor makes of one, as rows of numbers and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.checkpoint.hf_video import VideoForm, VideoRuns, form_of, video_frame, video_place, why_none
from saccade.models.bridge.images import MediaInputs
from saccade.models.vision.preprocess import Pixels
from saccade.types.media import Clip, Size


class VideoInputs(MediaInputs[VideoForm]):
    def __init__(
        self, processor: Any, config: Any, patch_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.place = video_place(processor, config)
        self.runs = VideoRuns(processor, self.place.written)
        super().__init__(self.runs, video_frame(processor, self.place), patch_dim, dtype, device)

    def rows(self, frames: Pixels, clip: Clip) -> Tensor:
        """Of frames [n, height, width, 3]."""
        size = Size(frames.shape[2], frames.shape[1])
        form = form_of(size, clip)
        output = self.runs.of_frames(torch.from_numpy(np.ascontiguousarray(frames)), form)
        blank = f"blank ones of their {size.width}x{size.height} pixels"
        return self.packed(self.checked(output, form, f"{len(frames)} frames", blank))


def video_inputs(
    processor: Any, config: Any, patch_dim: int, dtype: torch.dtype, device: torch.device
) -> VideoInputs | None:
    """None for a model that reads no videos."""
    if why_none(processor) is not None:
        return None
    try:
        return VideoInputs(processor, config, patch_dim, dtype, device)
    except Exception:  # of the processor: the rules of prompts have said why no video comes
        return None
