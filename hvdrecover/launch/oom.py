"""Signs that the kernel has killed for lack of memory: its own word, and the cgroup's."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def kills() -> int:
    """Return how many processes were killed for lack of memory, in this cgroup or on this host, so far."""
    return max(_count(_cgroup() / "memory.events"), _count(Path("/proc/vmstat")))


def _cgroup() -> Path:
    """The cgroup (version 2) of this process."""
    try:
        line = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1]
    except (OSError, IndexError):
        return _CGROUPS
    return _CGROUPS / line.rpartition(":")[2].lstrip("/")


def _count(file: Path) -> int:
    try:
        words = file.read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
