"""The doctor's questions about a checkpoint root, asked on the host that would use it.

The trial writes only to a folder that jobs ignore, and removes it. Commits and claims are only read.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover.checkpoint import inspection
from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.store import check_is_ours
from hvdrecover.errors import StorageError, UnknownCommitError

_NBYTES = 1 << 25  # size of the file that the trial writes and reads


def root(url: str) -> dict[str, Any]:
    """Return the contents of a root, and the ``problem`` of writing and reading a file.

    The file stays, for other hosts to `see`, until `clean` removes it and the folders ``made`` for it.
    """
    opened = open_storage(url)
    check_is_ours(opened)
    try:
        entries = inspection.entries(opened)
    except UnknownCommitError:  # the root does not exist yet
        entries = []
    usable = next((entry for entry in entries if entry.is_whole), None)
    path = Path(opened.url.removeprefix("file://"))
    local = [path, *path.parents] if opened.url.startswith("file://") else []
    existing = next((folder for folder in local if folder.exists()), None)
    folder = f"{TEMPORARY}doctor-{uuid.uuid4().hex}"
    return {
        "url": opened.url,
        "commits": Counter(entry.state for entry in entries),
        "broken": sum(not entry.is_whole and entry.state != "incomplete" for entry in entries),
        "newest": usable and {"commit": usable.commit, "time": usable.time},
        "free": shutil.disk_usage(existing).free if existing is not None else None,
        "made": [str(each) for each in local if not each.exists()],
        "folder": folder,
        "problem": _write(opened, f"{folder}/written"),
    }


def _write(opened: Storage, path: str) -> str:
    """Write a file, and read it; return the problem, or an empty string."""
    buffer, back = allocate(_NBYTES), allocate(_NBYTES)
    buffer[:] = np.random.default_rng().integers(0, 256, _NBYTES, dtype=np.uint8)  # cannot be compressed
    try:
        opened.write(path, buffer)
        read = opened.read_into(path, back)
    except StorageError as error:
        return str(error)
    if read.size == _NBYTES and np.array_equal(back, buffer):
        return ""
    return "it reads other bytes than it wrote, so the disk, the server or the network is faulty"


def see(url: str, folder: str) -> bool:
    """Return whether this host sees the file of a trial."""
    return open_storage(url).size(f"{folder}/written") is not None


def clean(url: str, folder: str, made: list[str]) -> None:
    """Remove the files of a trial, and the folders that it has made."""
    open_storage(url).delete(folder)
    for each in made:
        with contextlib.suppress(OSError):  # a job has started to use it
            Path(each).rmdir()
