"""Whether a fast kernel is used on a device, or its fallback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from saccade.kernels.launch.compile_ahead import add_self_test, is_compiling

_log = logging.getLogger(__name__)


def assert_agree(result: Any, expected: Any, tolerance: float, *, equal_nan: bool = False) -> None:
    """For self-tests. Where kernels are only compiled there is nothing to compare."""
    if not is_compiling():
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance, equal_nan=equal_nan)


@contextmanager
def _seeded(case: tuple[Hashable, ...]) -> Iterator[None]:
    """A self-test has the same random numbers at every start, and others keep theirs."""
    gpus = [one for one in case if isinstance(one, torch.device) and one.type == "cuda" and torch.cuda.is_available()]
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(0)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        yield


@dataclass(eq=False)
class KernelChoice:
    """Called with a device and what else decides, it says whether the kernel is used; each case is decided once.

    The first call compiles the kernel, so it must not happen during CUDA graph capture.
    """

    name: str
    supports: Callable[..., bool]  # takes the arguments of the call, as `self_test` does
    self_test: Callable[..., object]  # raises if the kernel does not compile, or is wrong
    fallback: str  # what runs instead, for the log
    why: str = ""  # it is used, for the log
    decided: dict[tuple[Hashable, ...], bool] = field(default_factory=dict)

    def __call__(self, *case: Hashable) -> bool:
        if case not in self.decided and is_compiling():
            return self._expect(*case)
        if case not in self.decided:
            self.decided[case] = self._decide(*case)
        return self.decided[case]

    def _expect(self, *case: Hashable) -> bool:
        """That the kernel passes its self-test, whose kernels are compiled ahead."""
        try:
            is_supported = self.supports(*case)
        except Exception:  # `_decide` reports it
            return False
        if is_supported:
            add_self_test((self.name, case), partial(self.self_test, *case))
        return is_supported

    def _decide(self, *case: Hashable) -> bool:
        """Any exception (a missing Triton feature, a wrong result) disables the kernel: the fallback is correct."""
        try:
            if not self.supports(*case):
                return False
            with _seeded(case):
                self.self_test(*case)
        except Exception as error:
            _log.warning("%s cannot be used: %s (%s: %s)", self.name, self.fallback, type(error).__name__, error)
            return False
        if self.why:
            _log.info("%s is used: %s", self.name, self.why)
        return True
