"""Copies to a device that the host does not wait for. Knows nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy from memory that is not pinned may wait for all that the device has to do.

    PyTorch keeps what was pinned here until the copy is done.
    """
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
