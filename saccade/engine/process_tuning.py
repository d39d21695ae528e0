"""Memory of processes that run for weeks. Knows the interpreter and nothing of what runs in it."""

from __future__ import annotations

import gc
import os
import sys
from ctypes import CDLL
from pathlib import Path

_LIBC = CDLL(None) if sys.platform == "linux" else None
_SWITCH_SECONDS = 5e-5  # Python's own 5 ms are several steps


def freeze() -> None:
    """After the start: what exists now stays, and looking through it again takes longer than a step."""
    gc.collect()
    gc.freeze()
    trim()


def unfreeze() -> None:
    gc.unfreeze()


def switch_threads_often() -> None:
    """For this process: a launch that released the interpreter gets it back soon from decoding threads."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def collect() -> None:
    """At a quiet moment: free what only a collection frees.

    Those are objects in cycles, and the interpreter's spare tuples, up to 2,000 of each size. By itself a
    collection comes after thousands of requests, because most of what they leave is freed without one.
    """
    gc.collect()


def resident_bytes() -> int:
    """Memory of this process now; 0 where only Linux would tell."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def trim() -> None:
    """Give freed memory back to the system, which glibc does only at the end of its heap. Takes milliseconds.

    A step's tensors lie between what stays, such as the kernels that oneDNN makes for each new number of
    tokens. Each of those makes a hole too small for the next step's tensors, and the heap grows.
    """
    malloc_trim = getattr(_LIBC, "malloc_trim", None)  # musl has none
    if malloc_trim is not None:
        malloc_trim(0)
