"""What a soak looks at: memory, descriptors, threads and children of processes, and how they drift. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import psutil

_MIB = 1 << 20
_MIN_POINTS = 8
_MAX_POINTS = 600  # of a fit, which takes the square of them
_WORKER = "saccade.engine.ipc.worker"
MEASURES = ("rss", "uss", "fds", "threads", "children")


Owners = dict[str, float]
"""Memory that a process has alone, by what it is for, MiB. Its helpers' is beside it."""
_ARENA = 64 << 20  # glibc puts the heaps of threads at multiples of it
_LARGE = 8 << 20


class Sample(NamedTuple):
    """One look at one process."""

    at: float  # seconds since the soak began
    rss: float  # MiB
    uss: float  # MiB that no other process shares, without files, which others map and leave
    fds: int
    threads: int
    children: int
    owners: Owners


@dataclass
class Watch:
    """Looks at named processes; one that is gone is a failure, once."""

    pids: dict[str, int]
    samples: dict[str, list[Sample]] = field(init=False)
    deaths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samples = {name: [] for name in self.pids}

    def look(self, at: float) -> None:
        for name, pid in tuple(self.pids.items()):
            try:
                self.samples[name].append(_sample(psutil.Process(pid), at))
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                self.deaths.append(f"{name} (process {pid}) ended after {at:.0f} s")
                del self.pids[name]


def _sample(process: psutil.Process, at: float) -> Sample:
    if process.status() == psutil.STATUS_ZOMBIE:
        raise psutil.ZombieProcess(process.pid)
    memory = process.memory_full_info()
    children = process.children()
    owners = owners_of(process.pid) | {"helpers": sum(map(_uss, children)) / _MIB}
    sizes = (memory.rss / _MIB, memory.uss / _MIB - owners.get("files", 0.0))
    return Sample(at, *sizes, process.num_fds(), process.num_threads(), len(children), owners)


def owners_of(pid: int) -> Owners:
    """From the kernel's list of mappings."""
    owners: Owners = {}
    owner = ""
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            fields = line.split()
            if "-" in fields[0] and not fields[0].endswith(":"):
                owner = _owner(fields)
            elif fields[0] in ("Private_Clean:", "Private_Dirty:"):
                owners[owner] = owners.get(owner, 0.0) + int(fields[1]) / 1024
    return owners


def _owner(mapping: Sequence[str]) -> str:
    start, end = (int(bound, 16) for bound in mapping[0].split("-"))
    name = mapping[5] if len(mapping) > 5 else ""
    if name.startswith("/memfd:"):
        return "shared pixels"
    if name.startswith("["):
        return name.strip("[]").partition(":")[0]  # heap, stack
    if name:
        return "files"
    if start % _ARENA == 0 and end - start <= _ARENA:
        return "heaps of threads"
    return "large blocks" if end - start >= _LARGE else "small blocks"


def _uss(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().uss)
    except psutil.Error:
        return 0.0


def engine_of(server: int) -> int:
    """Process id of the engine that belongs to a server; other children check schemas."""
    for child in psutil.Process(server).children():
        if any(_WORKER in argument for argument in child.cmdline()):
            return int(child.pid)
    raise RuntimeError(f"process {server} has no child that runs {_WORKER}")


# --- numbers ----------------------------------------------------------------------------------------------------------


def theil_sen(points: Sequence[tuple[float, float]]) -> float | None:
    """The median slope of all pairs of (seconds, value), an hour: a few outliers do not move it. None for too few."""
    thinned = np.array(_thinned(points))
    if len(thinned) < _MIN_POINTS:
        return None
    later, earlier = np.triu_indices(len(thinned), 1)[::-1]
    rise = thinned[later] - thinned[earlier]
    apart = rise[:, 0] > 0
    return float(np.median(rise[apart, 1] / rise[apart, 0]) * 3600) if apart.any() else None


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of neighbours where there are more points than a fit takes."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    groups = np.array_split(np.array(points), _MAX_POINTS)
    return [(float(at), float(value)) for at, value in (np.median(group, axis=0) for group in groups)]


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed; None of none."""
    ordered = sorted(values)
    return ordered[max(0, int(np.ceil(share * len(ordered))) - 1)] if ordered else None
