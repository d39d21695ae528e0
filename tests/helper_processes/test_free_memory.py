"""Host memory that may be taken: within the limits of all groups that the process is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saccade.helpers.free_memory import free_in_cgroups, free_ram


def group(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


@pytest.mark.parametrize("path", ["/", "/system.slice/saccade.service"])
def test_a_group_and_its_parents_limit_what_is_free(tmp_path: Path, path: str) -> None:
    root = tmp_path / "cgroup"
    membership = tmp_path / "self"
    membership.write_text(f"0::{path}\n")
    group(root, max="max", current=900)
    group(root / "system.slice", max=1_000, current=300)
    group(root / "system.slice" / "saccade.service", max=500, current=450, stat="anon 100\ninactive_file 350")
    found = sorted(free_in_cgroups(root, membership))
    assert found == ([] if path == "/" else [400, 700])


def test_groups_of_version_1_count_too(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    membership = tmp_path / "self"
    membership.write_text("12:cpu,cpuacct:/x\n5:memory:/docker/abc\n0::/\n")
    group(root / "memory", limit_in_bytes=2_000, usage_in_bytes=500)
    assert list(free_in_cgroups(root, membership)) == [1_500], "a container sees its own group as the root"
    stat = "inactive_file 1\ntotal_inactive_file 100"
    group(root / "memory" / "docker" / "abc", limit_in_bytes=900, usage_in_bytes=600, stat=stat)
    assert sorted(free_in_cgroups(root, membership)) == [400, 1_500]


def test_without_groups_the_machine_alone_counts(tmp_path: Path) -> None:
    assert not list(free_in_cgroups(tmp_path / "none", tmp_path / "none"))
    assert free_ram() > 0


def test_a_system_that_tells_only_its_whole_memory_has_that(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: number for name, number in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", names)  # macOS
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert free_ram() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
