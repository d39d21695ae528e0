"""Launches that overlap: starting before the one ahead has ended, and asking for memory that a later one reads.

    stream of a layer    | product ....... |          between two launches the memory has nothing to do
                                           | attention .. |
    with both               | product ....... |
                                    | attention .. |      programs are there already, waiting
                                     ^ asks for the next product's weights: they come to the second cache meanwhile

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

_LINE = 128  # bytes that memory is read in


def is_early(x: Tensor) -> bool:
    """Whether kernels on this tensor's device can start early: from Hopper on."""
    return x.is_cuda and _has_early_launch(x.device)


def overlap(early: bool) -> dict[str, bool]:
    """Options of a launch."""
    return {"launch_pdl": True} if early else {}


def lines_of(weights: Tensor | None) -> int:
    """How many cache lines a launch has to ask for; none in Triton's interpreter, which has no caches."""
    if weights is None or not weights.is_cuda:
        return 0
    return weights.numel() * weights.element_size() // _LINE


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
    """Pointers, one into each cache line that is going to be read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def ask_for_share(weights: tl.tensor, LINES: tl.constexpr, program: tl.tensor, programs: tl.tensor) -> None:
    """A program's share of LINES cache lines; the last line stands for those beyond it."""
    if LINES > 0:
        of_line: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth  # elements
        for first in range(program * 256, LINES, programs * 256):
            own = tl.minimum(first + tl.arange(0, 256), LINES - 1)
            ask(weights + own.to(tl.int64) * of_line)
