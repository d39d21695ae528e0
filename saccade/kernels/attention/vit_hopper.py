"""Full attention inside each packed picture for Hopper GPUs. Knows rows and where pictures begin, no tower.

The same work as `packed_vit`, which stays the reference; `hopper_vit_kernel` says how it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from saccade.kernels.attention.online_softmax import LOG2_E
from saccade.kernels.attention.vit_combine import CELL, combine
from saccade.kernels.attention.vit_hopper_kernel import vit_kernel
from saccade.kernels.attention.vit_schedule import KEYS, TILE_ROWS, TileSchedule

_FIRST, _REST = 64, 16  # a head is two products, as in `packed_vit`
_STAGES, _REGISTERS = 8, 128  # the latter of a thread, on average over all roles
_MIN_LENGTH = 256  # smaller pictures are not worth four roles


def suits(lengths: Sequence[int], dim: int, dtype: torch.dtype) -> bool:
    """Float16 has too small a range for weights without a maximum. Copies want rows of whole 16 bytes."""
    has_heads = _FIRST < dim <= _FIRST + _REST and dim % 8 == 0
    return has_heads and dtype == torch.bfloat16 and min(lengths) >= _MIN_LENGTH


def takes_parted(dim: int) -> bool:
    """Whether such heads may come in the order of `hopper_qkv_rope`."""
    return dim == _FIRST + _REST


class HopperVit:
    """Attention over one packing, layer after layer.

    After the first the compiled kernel is launched itself: to find it anew takes the host longer than the rest of a
    layer together, and nothing that it is chosen by changes.
    """

    def __init__(self, schedule: TileSchedule) -> None:
        self.schedule = schedule
        self._launches: dict[bool, Callable[..., object]] = {}
        self._combine: Callable[..., object] | None = None

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        """Contiguous q, k, v [T, 3, heads, d] -> [T, heads, d]."""
        return self._attend(qkv, scale, is_parted=False)

    def takes_parted(self, dim: int, dtype: torch.dtype) -> bool:
        return takes_parted(dim)

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        """The same, queries and keys being in the order of `hopper_qkv_rope`."""
        return self._attend(qkv, scale, is_parted=True)

    def _attend(self, qkv: Tensor, scale: float, is_parted: bool) -> Tensor:
        tokens, _, heads, dim = qkv.shape
        assert qkv.is_contiguous()
        schedule, rows = self.schedule, qkv.view(tokens, -1)
        out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
        parts = torch.empty((max(1, schedule.slots), TILE_ROWS, dim + CELL), dtype=torch.float32, device=qkv.device)
        descriptors = (_descriptor(rows, columns) for columns in (_FIRST, _REST))
        args = (*descriptors, schedule.offsets, schedule.items, out, parts, scale * LOG2_E, heads)
        sizes = (dim, KEYS, _STAGES, is_parted)
        launch, grid = self._launches.get(is_parted), (schedule.programs, 1, 1)
        if launch is None:
            kernel = vit_kernel[grid](*args, *sizes, num_warps=4, maxnreg=_REGISTERS, launch_pdl=True)
            self._launches[is_parted] = kernel[grid]
        else:
            launch(*args, *sizes)
        if schedule.slots:
            self._combine = combine(parts, schedule, out, self._combine)
        return out


def _descriptor(rows: Tensor, columns: int) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [KEYS, columns], _layout(columns))


@lru_cache
def _layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=2)
