"""Launches that overlap: a program may start before the launch ahead of it in the stream has ended.

    one after the other     | product ....... |
                                                | attention .. |      starting takes a microsecond or two
    early                   | product ....... |
                                      | wait | attention .. |         programs are there already

A program that starts early must wait before it touches what the launch ahead reads or writes. In every launch at least
one program waits before it lets the next launch start, so whatever two or more launches back have written is there from
the beginning, and may be read without waiting. Knows addresses, not what lies there.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def is_early(x: Tensor) -> bool:
    """Whether kernels on this tensor's device can start early: from Hopper on."""
    return x.is_cuda and _has_early_launch(x.device)


def overlap(early: bool) -> dict[str, bool]:
    """Options of a launch."""
    return {"launch_pdl": True} if early else {}


@lru_cache
def _has_early_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def wait_for_turn(EARLY: tl.constexpr) -> None:
    """Wait for the launch ahead, then let the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask(lines: tl.tensor) -> None:
    """Pointers, one into each cache line that is going to be read: they come to the second cache meanwhile."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )
