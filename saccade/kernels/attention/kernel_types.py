"""What the attention kernels of a job have in common: `registry` builds them, passes call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class DecodeKernel(NamedTuple):
    plan: Callable[[Tensor, int], Callable[..., Tensor]]  # (seq_lens, SMs), once a step -> what runs as `paged_decode`


class PrefillKernel(NamedTuple):
    attend: Callable[..., Tensor]  # as `paged_prefill`
    rows: Callable[[int], int]  # of the tiles of a step of so many tokens


class MlaKernels(NamedTuple):
    decode: Callable[..., Tensor]  # as `mla_decode`
    prefill: Callable[..., Tensor]  # as `mla_prefill`
    expanded: Callable[..., Tensor]  # as `mla_expanded_prefill`
