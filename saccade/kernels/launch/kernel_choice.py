"""Whether a fast kernel is used on a device, or its fallback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class KernelChoice:
    """Called with a device and what else decides, it says whether the kernel is used; each case is decided once.

    The first call compiles the kernel, so it must not happen during CUDA graph capture.
    """

    name: str
    supports: Callable[..., bool]  # takes the arguments of the call, as `self_test` does
    self_test: Callable[..., object]  # raises if the kernel does not compile, or is wrong
    fallback: str  # what runs instead, for the log
    decided: dict[tuple[Hashable, ...], bool] = field(default_factory=dict)

    def __call__(self, *case: Hashable) -> bool:
        if case not in self.decided:
            self.decided[case] = self._decide(*case)
        return self.decided[case]

    def _decide(self, *case: Hashable) -> bool:
        """Any exception (a missing Triton feature, a wrong result) disables the kernel: the fallback is correct."""
        try:
            if not self.supports(*case):
                return False
            self.self_test(*case)
        except Exception as error:
            _log.warning("%s cannot be used: %s (%s: %s)", self.name, self.fallback, type(error).__name__, error)
            return False
        return True
