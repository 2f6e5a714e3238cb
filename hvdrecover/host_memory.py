"""The memory that the processes of a host, or of a cgroup, can still have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FILES = ("inactive_file", "active_file")  # both can be dropped, and both are part of ``MemAvailable``


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
    limit, less what is used, but for cached files.
    """
    return _least("MemAvailable:", proc=proc, cgroups=cgroups)


def left(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Available | None:
    """Return `available`, with swap where no cgroup limits; None if the system does not tell."""
    try:
        return _least("MemAvailable:", "SwapFree:", proc=proc, cgroups=cgroups)
    except (OSError, ValueError):
        return None


def _least(*fields: str, proc: Path, cgroups: Path) -> Available:
    """Return the sum of fields of ``/proc/meminfo``, or less if a cgroup leaves less."""
    words = (proc / "meminfo").read_text().split()
    host = sum(int(words[words.index(field) + 1]) * 1024 for field in fields)
    rooms = [room for folder in _cgroups(proc, cgroups) if (room := _room(folder)) is not None]
    least = min([host, *rooms])
    return Available(least, least < host)


def _room(folder: Path) -> int | None:
    """Return what a cgroup leaves; None if it has no limit."""
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            text = (folder / limit).read_text().strip()
            if not text.isdigit():  # "max"
                return None
            words = (folder / "memory.stat").read_text().split()
            names = [name for each in _FILES if (name := prefix + each) in words]
            cached = sum(int(words[words.index(name) + 1]) for name in names)
            return max(0, int(text) - int((folder / used).read_text()) + cached)
        except OSError:
            continue
    return None


def _cgroups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the cgroups that limit this process's memory, version 1 or 2, from its own to the topmost."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # version 2 has one hierarchy for all
            own = (cgroups / "memory" if controllers else cgroups) / path.lstrip("/")
            found += [own, *(above for above in own.parents if above.is_relative_to(cgroups))]
    return found
