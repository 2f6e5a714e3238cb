"""The file systems that folders lie in."""

from __future__ import annotations

import os
from pathlib import Path


def kind_of(folder: Path) -> str:
    """Return the type of the file system that a folder lies in, such as ``ext4``; empty if none is known."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for mount in mounts:  # see proc_pid_mountinfo(5)
        fields, _, rest = mount.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return ""
