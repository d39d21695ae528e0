"""Programmatic dependent launch (PDL): a kernel may start before the previous kernel of its stream has ended.

    without     | GEMM .......... |
                                    | attention .. |      a launch costs a microsecond or two
    with PDL    | GEMM .......... |
                           | wait | attention .. |        its programs are resident already

A kernel must wait before it touches what earlier kernels read or write. Kernels that call `pdl_release_then_wait`
release their dependents before they wait themselves, so several may be resident, each prefetching its own weights.
All wait before they end: when the previous kernel has ended, all before it have. Before its wait a kernel may read
only data written before the last kernel that waited first and released afterwards (`pdl_wait_then_release`); a decode
step has one after its inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.launch.device import gpu_of


def supports_pdl(x: Tensor) -> bool:
    """From Hopper on."""
    return gpu_of(x.device).capability >= (9, 0)


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch options."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def pdl_wait_then_release(PDL: tl.constexpr) -> None:
    """Wait for the previous kernel, then release the next: it may read all that was written before this one."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def pdl_release_then_wait(PDL: tl.constexpr) -> None:
    """Release the next kernel, then wait for the previous one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_l2(lines: tl.tensor) -> None:
    """`lines`: pointers, one into each cache line that will be read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )
