"""The processors of this host: their kind, and how many of them this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from hvdrecover.cgroups import folders as cgroups_of

# What decides which code a library picks. Kernels differ in what else they list.
_EXTENSIONS = ("avx", "amx", "fma", "sse4", "asimd", "sve", "sme", "bf16", "i8mm")
_NAMES = ("model name", "cpu family", "model", "CPU implementer", "CPU part", "cpu")  # x86, Arm, POWER
_FLAGS = ("flags", "Features")


def kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what processors these are: those of one kind compute the same bits with the same library."""
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    names = [fields[name] for name in _NAMES if name in fields]
    words = next((fields[name].split() for name in _FLAGS if name in fields), [])
    extensions = sorted(word for word in words if word.startswith(_EXTENSIONS))
    return " ".join([*names, *extensions]) or os.uname().machine


def to_use(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[int | None]:
    """Return the processors that this process may keep busy: their numbers.

    Where a cgroup gives it less time than these have, there is a None for each one that it can fill instead:
    to be bound to one would have several containers compete for the first ones of their host.
    """
    allowed = sorted(os.sched_getaffinity(0))
    given = share(proc, cgroups)
    if given is None or given >= len(allowed):
        return [*allowed]
    return [None] * max(1, int(given))


def share(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return to how many processors' time the cgroups of this process limit it; None if to none."""
    found = [given for folder in cgroups_of("cpu", proc, cgroups) if (given := _given(folder)) is not None]
    return min(found, default=None)


def _given(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if quota.isdigit() and int(quota) else None  # else "max", or -1
    except (OSError, ValueError):
        return None
