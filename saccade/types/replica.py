"""Which worker of a server a process is. A noun: standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replica:
    """Which worker of a server this is: one of its engines, or one of its encoder workers."""

    index: int = 0  # of this engine
    count: int = 1  # engines, as many as there may be
    encoders: tuple[str, ...] = ()  # addresses of the encoder workers that all engines share
    encoder: int | None = None  # the index of this encoder worker; None: it is an engine
    num_local: int | None = None  # workers that may share its machine; None: all
    has_own_device: bool = False  # PyTorch sees a GPU, or a number of threads, that are its own

    @property
    def is_alone(self) -> bool:
        """Whether there is no other engine."""
        return self.count == 1

    @property
    def num_workers(self) -> int:
        """Engines and encoder workers."""
        return self.count + len(self.encoders)
