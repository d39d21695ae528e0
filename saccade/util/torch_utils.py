"""Which GPU it is, and copies to it that the host does not wait for. Knows nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

Capability = tuple[int, int]
"""Of a GPU, as CUDA numbers them: H100 and H200 are (9, 0)."""


def capability_of(device: torch.device) -> Capability:
    """The only place that asks. (0, 0) for what is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy from memory that is not pinned may wait for all that the device has to do.

    PyTorch keeps what was pinned here until the copy is done.
    """
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
