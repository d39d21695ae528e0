"""Which errors are an image's own, and what its requests are told."""

from __future__ import annotations

import torch

from saccade.errors import RequestError
from saccade.types.media import MediaItem


def is_of_the_device(error: Exception) -> bool:
    """Whether the CUDA context has died: then no image is to blame and the step must fail.

    Out of memory is not of this kind: the allocator refuses before anything is launched.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def unusable(item: MediaItem, kind: type[Exception]) -> RequestError:
    width, height = item.header.size
    return RequestError(
        f"the picture of {width}x{height} pixels ({item.geometry.tokens} tokens) could not be encoded "
        f"({kind.__name__}); a smaller max_pixels may help",
        code="invalid_image",
    )
