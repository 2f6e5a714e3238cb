"""The file systems that folders lie in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """The mount on which a folder lies.

    Attributes:
        kind: the type of the file system, such as ``ext4`` or ``fuse.sshfs``; empty if none is known.
        source: what is mounted, such as a device; programs of FUSE have their own names there, or a bucket's.
    """

    kind: str
    source: str


def mount_of(folder: Path) -> Mount:
    """Return what is mounted where a folder lies."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return Mount("", "")
    return described(mounts, number)


def described(mounts: list[str], number: str) -> Mount:
    """Return what the kernel says of the mount of a device.

    Args:
        mounts: the lines of ``mountinfo``; see proc_pid_mountinfo(5).
        number: the device's, as ``major:minor``.
    """
    for mount in mounts:
        fields, _, rest = mount.partition(" - ")
        if fields.split()[2] == number:
            return Mount(*rest.split(" ")[:2])
    return Mount("", "")


def kind_of(folder: Path) -> str:
    """Return the type of the file system that a folder lies in, such as ``ext4``; empty if none is known."""
    return mount_of(folder).kind
