"""The cgroups that limit this process, of version 1 or 2."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def folders(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """Return the cgroups that this process is in, from its own to the topmost.

    Args:
        controller: of version 1, such as "memory"; version 2 has one hierarchy for all.
        proc: where /proc is.
        cgroups: where their file system is.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            own = (cgroups / controller if controllers else cgroups) / path.lstrip("/")
            found += [own, *(above for above in own.parents if above.is_relative_to(cgroups))]
    return found
