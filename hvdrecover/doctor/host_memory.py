"""The memory that a host has left for the arenas that commits are copied into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.doctor.findings import Finding, failure, ok, warning

ARENAS = 2  # of a state's size on each rank, at most: one that is kept, one while that is being written
_MEMORY = "host memory"


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
    left = [room for folder in _folders(proc, cgroups) if (room := _room(folder)) is not None]
    return Available(min([host, *left]), min([host, *left]) < host)


def _folders(proc: Path, cgroups: Path) -> list[Path]:
    """The memory cgroups that this process is in, from its own to the topmost, of version 1 or 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            own = (cgroups / "memory" if controllers else cgroups) / path.lstrip("/")
            found += [own, *(above for above in own.parents if above.is_relative_to(cgroups))]
    return found


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


def judge(free: Mapping[str, Available], slots: Mapping[str, int], state: int | None) -> Finding:
    """Return whether the hosts have memory for the arenas.

    Args:
        free: host to what it has left.
        slots: host to its number of ranks.
        state: size of the training state in bytes, or None if the user has not said.
    """
    facts = {
        host: {"bytes_available": each.nbytes, "limited_by_cgroup": each.limited, "ranks": slots[host]}
        for host, each in free.items()
    }
    if state is None:
        rooms = ", ".join(
            f"{_gigabytes(each.nbytes // (ARENAS * slots[host]))} on {host}" for host, each in free.items()
        )
        rule = (
            f"commits take up to {ARENAS} times the state's size on each rank, so there is room for states of"
        )
        return ok(_MEMORY, f"{rule} {rooms}", hosts=facts, state_bytes=None)
    tight = {host: each for host, each in free.items() if each.nbytes < ARENAS * state * slots[host]}
    if not tight:
        what = f"{ARENAS} times {_gigabytes(state)} for each rank fit on every host"
        return ok(_MEMORY, what, hosts=facts, state_bytes=state)
    what = "; ".join(
        f"{host} has {_gigabytes(each.nbytes)} left{' in its cgroup' if each.limited else ''}, and commits "
        f"of {_gigabytes(state)} on {slots[host]} ranks take up to {_gigabytes(ARENAS * state * slots[host])}"
        for host, each in tight.items()
    )
    remedy = "Free memory there, raise the cgroup's limit, or use fewer slots or larger hosts."
    if any(each.nbytes < state * slots[host] for host, each in tight.items()):
        return failure(_MEMORY, what, remedy, hosts=facts, state_bytes=state)
    return warning(_MEMORY, what, remedy, hosts=facts, state_bytes=state)


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
