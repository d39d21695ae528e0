"""Memory of processes that run for weeks. Knows the interpreter and nothing of what runs in it."""

from __future__ import annotations

import gc


def settle() -> None:
    """After the start: what exists now stays to the end, and looking through it again takes longer than a step."""
    gc.collect()
    gc.freeze()


def tidy() -> None:
    """At a quiet moment: free what only a collection frees.

    Those are objects in cycles, and the interpreter's spare tuples, of which it keeps up to 2,000 of each size. By
    itself a collection comes after thousands of requests, because most of what they leave is freed without one.
    """
    gc.collect()
