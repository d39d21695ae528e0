"""Processor time that a request's grammars may take. Knows no grammar.

Time of the processor, not of the clock: on a busy machine the same work costs the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Allowance:
    """Some seconds at once, and a little more with each token. What is saved up is never more than at the start."""

    def __init__(self, at_once: float, per_token: float) -> None:
        self._maximum = self._left = at_once
        self._per_token = per_token
        self._lock = threading.Lock()

    @property
    def is_spent(self) -> bool:
        return self._left < 0

    def earn(self) -> None:
        """A token was made."""
        with self._lock:
            self._left = min(self._left + self._per_token, self._maximum)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What this thread computes inside is taken off."""
        start = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self._left -= time.thread_time() - start


class Budget:
    """What all answers of one request share."""

    def __init__(self) -> None:
        # Honest grammars take 0.05 ms to take a token and up to 3 ms for a mask, with a vocabulary of 150,000.
        self.step = Allowance(at_once=0.25, per_token=0.0005)  # inside of steps, while everybody waits
        self.masks = Allowance(at_once=2.0, per_token=0.010)  # beside them
