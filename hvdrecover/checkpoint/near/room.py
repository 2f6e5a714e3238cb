"""The decision whether a host has room for a near tier; pure but for what the kernel is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint.storage.local import mount_of
from hvdrecover.host_memory import available

BUFFERS = 3  # commits of which a near root has memory, at most
_FLOOR = (
    1 << 28
)  # bytes of shared memory that data loaders' worker processes get at least; containers have 64 MB


@dataclass(frozen=True)
class Room:
    """The room on a host.

    Attributes:
        total: size of the file system in bytes.
        free: what is free there.
        memory: what this process's cgroups and the host have left; None if the files are not in memory.
    """

    total: int
    free: int
    memory: int | None


def reserve(room: Room) -> int:
    """Return how many bytes of a file system in memory are left to others; 0 if the files are on a disk."""
    return 0 if room.memory is None else max(room.total // 4, _FLOOR)


def free(folder: Path) -> int:
    """Return how many bytes are free in a folder's file system.

    Raises:
        OSError: the folder can't be read.
    """
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def look(folder: Path) -> Room:
    """Return the room in a folder's file system.

    Raises:
        OSError: the folder, or ``/proc``, can't be read.
    """
    status = os.statvfs(folder)
    in_memory = "tmpfs" in mount_of(folder).kind
    left = available().nbytes if in_memory else None
    return Room(status.f_blocks * status.f_frsize, free(folder), left)


def refusal(room: Room, nbytes: int, held: int = 0) -> str | None:
    """Return why a near tier would not fit; None if it does.

    It fits if there is room for `BUFFERS` commits. In memory, they must leave the `reserve` of the file
    system, and a quarter of the memory that is left: training needs some, and a cgroup kills beyond its
    limit.

    Args:
        room: of the host.
        nbytes: size of a commit.
        held: bytes of the near root that are there already.
    """
    need = max(0, BUFFERS * nbytes - held)
    if need > room.free:
        return f"{BUFFERS} commits of {size(nbytes)} don't fit into the {size(room.free)} that are free"
    if need > room.free - reserve(room):
        return (
            f"{BUFFERS} commits of {size(nbytes)} would leave less than {size(reserve(room))} to data "
            f"loaders: {size(room.free)} of its {size(room.total)} are free"
        )
    if room.memory is not None and need > room.memory * 3 // 4:
        return f"{BUFFERS} commits of {size(nbytes)} are too much for the {size(room.memory)} of memory left"
    return None


def largest(room: Room, held: int = 0) -> int:
    """Return the size of the largest commits for which a near tier fits; see `refusal`."""
    need = room.free
    if room.memory is not None:
        need = min(room.free - reserve(room), room.memory * 3 // 4)
    return max(0, need + held) // BUFFERS


def size(nbytes: float) -> str:
    """Return an amount of memory in words."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"
