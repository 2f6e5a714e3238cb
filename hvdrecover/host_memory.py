"""The memory that the processes of a host, or of a cgroup, can still have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdrecover.cgroups import folders as cgroups_of


@dataclass(frozen=True)
class Available:
    """The memory that processes can still have.

    Attributes:
        nbytes: how much.
        limited: whether a cgroup limits it, and not the host.
    """

    nbytes: int
    limited: bool


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Available:
    """Return what the processes of this process's cgroup can still have.

    That is the kernel's ``MemAvailable``, or less if this cgroup, or one above it, has a limit: then the
    limit, less what is used, but for cached files that were not in use lately.
    """
    words = (proc / "meminfo").read_text().split()
    host = int(words[words.index("MemAvailable:") + 1]) * 1024
    left = [room for folder in cgroups_of("memory", proc, cgroups) if (room := _room(folder)) is not None]
    return Available(min([host, *left]), min([host, *left]) < host)


def left(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Available | None:
    """Return `available`, with swap where no cgroup limits; None if the system does not tell."""
    try:
        found = available(proc, cgroups)
        words = (proc / "meminfo").read_text().split()
        swap = 0 if found.limited else int(words[words.index("SwapFree:") + 1]) * 1024
    except (OSError, ValueError):
        return None
    return Available(found.nbytes + swap, found.limited)


def _room(folder: Path) -> int | None:
    """Return what a cgroup leaves; None if it has no limit."""
    for limit, used, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            text = (folder / limit).read_text().strip()
            if not text.isdigit():  # "max"
                return None
            words = (folder / "memory.stat").read_text().split()
            cached = int(words[words.index(unused) + 1]) if unused in words else 0
            return max(0, int(text) - int((folder / used).read_text()) + cached)
        except OSError:
            continue
    return None
