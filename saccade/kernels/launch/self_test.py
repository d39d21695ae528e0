"""Whether a kernel may be used on a device: it is tried once, and one that fails gives way to what it replaces."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


def self_test_passes(trial: Callable[[], object], otherwise: str) -> bool:
    """`trial` raises where the kernel does not compile or is wrong; `otherwise` says what happens then.

    A compiler may lack what a kernel is written with, and whatever else it says: slower is better than not at all.
    """
    try:
        trial()
    except Exception as error:
        _log.warning("%s (%s: %s)", otherwise, type(error).__name__, error)
        return False
    return True
