"""What launches need to know: SMs and shared memory of the device, whether it is a Hopper GPU, and a model's heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: enough for splits, and few programs
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return _SHARED_MEMORY.get(capability, 99 << 10)


_SHARED_MEMORY = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}


def precision_of(q: Tensor) -> str:
    """float32 is for comparisons: three tf32 GEMMs keep its precision, one does not."""
    return "tf32x3" if q.dtype == torch.float32 else "tf32"
