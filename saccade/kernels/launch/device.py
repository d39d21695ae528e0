"""What launches need to know: facts about the device, and a model's heads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.util.torch_utils import Capability, capability_of


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


HOPPER: Capability = (9, 0)


class Gpu(NamedTuple):
    sms: int
    capability: Capability
    shared_memory: int  # bytes that a program may have


_SHARED_MEMORY = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
_INTERPRETER = Gpu(sms=4, capability=(0, 0), shared_memory=227 << 10)  # SMs: enough for splits, and few programs


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    capability = capability_of(device)
    usual = _SHARED_MEMORY.get(capability, 99 << 10)
    shared = getattr(properties, "shared_memory_per_block_optin", usual)  # not in every PyTorch
    return Gpu(properties.multi_processor_count, capability, shared)


def num_sms(device: torch.device) -> int:
    return gpu_of(device).sms


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: from 99 KiB (RTX, L4) to 227 KiB (Hopper)."""
    return gpu_of(device).shared_memory


def has_async_mma(device: torch.device) -> bool:
    """Whether MMAs read shared memory while the kernel goes on (Hopper, B200): a pipeline has one more buffer then."""
    return gpu_of(device).capability[0] in (9, 10)


def is_hopper(device: torch.device) -> bool:
    return gpu_of(device).capability == HOPPER


def has_tensor_memory(device: torch.device) -> bool:
    """Whether MMAs add up in a memory of their own (B200): it holds few tiles, and with more a kernel is a trap."""
    return gpu_of(device).capability[0] == 10


def precision_of(q: Tensor) -> str:
    """float32 is for comparisons: three tf32 GEMMs keep its precision, one does not."""
    return "tf32x3" if q.dtype == torch.float32 else "tf32"
