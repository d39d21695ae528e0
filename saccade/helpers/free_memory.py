"""Host memory that may be taken: what the machine has available, within the limits of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_V1 = ("limit_in_bytes", "usage_in_bytes")  # memory.*
_CGROUP_V2 = ("max", "current")


def free_ram() -> int:
    """What is available without swapping, and within the limits of the groups that this process is in."""
    pages = next(name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in os.sysconf_names)
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")  # macOS only tells what it has in all
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024  # page cache counts as free
    return min([free, *free_in_cgroups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def free_in_cgroups(root: Path, membership: Path) -> Iterator[int]:
    """What is left in each group that has a limit. Page cache that can be dropped counts as free."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    paths = {kind: path for _, kind, path in (line.split(":", 2) for line in lines)}
    for version, kind, names in ((root, "", _CGROUP_V2), (root / "memory", "memory", _CGROUP_V1)):
        group = version / paths.get(kind, "/").lstrip("/")
        for folder in {version, group, *group.parents}:  # a container may see its own group as the root
            limit, usage = (folder / f"memory.{name}" for name in names)
            if limit.exists() and usage.exists() and limit.read_text().strip() != "max":
                yield int(limit.read_text()) - int(usage.read_text()) + _droppable(folder / "memory.stat")


def _droppable(stat: Path) -> int:
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
