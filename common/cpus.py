"""CPUs that this process may use: affinity mask and CPU quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class UsableCpus:
    """CPUs for computing: the number of threads at once, at least 1, and the limit that sets it."""

    count: int
    source: str


def usable_cpus(root: Path = ROOT) -> UsableCpus:
    """Count the CPUs in the affinity mask, or fewer if a control group has a lower quota.

    A fraction of a CPU is left to other threads: a group that exceeds its quota is stopped as a
    whole, which stops every thread at the next barrier. `root` is the root of the file system;
    tests replace it.
    """
    if hasattr(os, "sched_getaffinity"):
        usable = UsableCpus(len(os.sched_getaffinity(0)), "affinity mask")
    else:
        usable = UsableCpus(os.cpu_count() or 1, "online CPUs")
    for folder in _control_groups(root):
        quota = _quota(folder)
        if quota is not None and int(quota) < usable.count:
            source = f"CPU quota of {quota:g} in /{folder.relative_to(root)}"
            usable = UsableCpus(max(int(quota), 1), source)
    return usable


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups with CPU limits, and of their parents."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # not Linux
    # "0::/path" is the group of version 2, "4:cpu,cpuacct:/path" one of version 1.
    paths = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = Path(path)
    for line in mounts:
        fields, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        inside, mounted_at = fields.split(" ")[3:5]
        top = folder = root / mounted_at.lstrip("/")
        # In a container the mount is often the process's own group, whatever its path outside.
        if paths[kind].is_relative_to(inside):
            folder = top / paths[kind].relative_to(inside)
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _quota(folder: Path) -> float | None:
    """Read the quota of one control group in CPUs; None if it has none."""
    try:
        if (limit := folder / "cpu.max").exists():
            quota_us, period_us = limit.read_text(encoding="utf-8").split()
        else:
            quota_us, period_us = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8").strip()
                for name in ("quota", "period")
            )
        return float(quota_us) / float(period_us) if quota_us not in ("max", "-1") else None
    except (OSError, ValueError):
        return None  # such as the root group, which has no limits
