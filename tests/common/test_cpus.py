"""Usable CPUs, counted in a fake file system with control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.cpus import UsableCpus, usable_cpus

AFFINITY = UsableCpus(8, "affinity mask")
V1_MOUNT = "32 31 0:29 {} /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNT = "41 31 0:38 {} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def tree(root: Path, group: str, mounts: str, files: dict[str, str]) -> Path:
    """Write the files of a system where this process is in `group`. files: by path."""
    texts = {"proc/self/cgroup": f"9:memory:/elsewhere\n{group}\n", "proc/self/mountinfo": mounts}
    for path, text in (texts | files).items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def v1(quota_us: int, folder: str = "sys/fs/cgroup/cpu") -> dict[str, str]:
    return {
        f"{folder}/cpu.cfs_quota_us": f"{quota_us}\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }


def test_without_control_groups_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == AFFINITY


@pytest.mark.parametrize(
    ("limit", "count"), [("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_a_containers_quota_is_rounded_down(tmp_path: Path, limit: str, count: int) -> None:
    files = {"sys/fs/cgroup/cpu.max": f"{limit}\n"}
    root = tree(tmp_path, "0::/", V2_MOUNT.format("/"), files)
    assert usable_cpus(root).count == count


def test_the_lowest_quota_of_all_parents_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/pods/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/pods/weir/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pods/weir/worker/cpu.max": "600000 100000\n",
    }
    root = tree(tmp_path, "0::/pods/weir/worker", V2_MOUNT.format("/"), files)
    assert usable_cpus(root) == UsableCpus(3, "CPU quota of 3 in /sys/fs/cgroup/pods")


def test_a_mount_that_shows_only_the_own_group_is_read_at_its_top(tmp_path: Path) -> None:
    mounts = V1_MOUNT.format("/docker/0123")
    root = tree(tmp_path, "4:cpu,cpuacct:/docker/0123", mounts, v1(150_000))
    assert usable_cpus(root) == UsableCpus(1, "CPU quota of 1.5 in /sys/fs/cgroup/cpu")


def test_a_group_outside_the_mount_is_read_at_the_mount(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "200000 100000"}
    root = tree(tmp_path, "0::/../outside", V2_MOUNT.format("/x"), files)
    assert usable_cpus(root).count == 2


def test_version_1_without_a_quota_and_a_second_hierarchy_limit_nothing(tmp_path: Path) -> None:
    mounts = (
        V1_MOUNT.format("/") + "31 1 0:9 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    files = v1(-1) | v1(100_000, "sys/fs/cgroup/memory")
    assert usable_cpus(tree(tmp_path, "4:cpu,cpuacct:/", mounts, files)) == AFFINITY


def test_unreadable_limits_are_ignored(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "a new format\n"}
    assert usable_cpus(tree(tmp_path, "0::/", V2_MOUNT.format("/"), files)) == AFFINITY
