"""The doctor's questions about storage: the checkpoint root, and the near tier of a host.

They run on the host that would use the storage. A trial writes only to a folder that jobs ignore, and removes
it. Commits and claims are only read.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover.checkpoint import inspection
from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.store import check_is_ours
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import StorageError, UnknownCommitError

_NBYTES = 1 << 25  # size of the file that a trial writes and reads
_WRITERS = 4  # writers that create one file at the same time


def root(url: str) -> dict[str, Any]:
    """Return the contents of a root, and the results of a trial; ``docs/doctor.md`` describes the keys.

    One file of the trial stays, for other hosts to `see`, until `clean`.
    """
    opened = open_storage(url)
    check_is_ours(opened)
    folder = f"{TEMPORARY}doctor-{uuid.uuid4().hex}"
    found = {"folder": folder, "path": f"{folder}/written", **_contents(opened)}
    try:
        return {**found, **_write(opened, found["path"]), **_create(opened, folder), "refused": ""}
    except StorageError as error:
        return {**found, "refused": str(error)}


def see(url: str, path: str) -> bool:
    """Return whether this host sees a file of a root."""
    return open_storage(url).size(path) is not None


def clean(url: str, folder: str, made: list[str]) -> None:
    """Remove the files of a trial, and the folders that it has made."""
    open_storage(url).delete(folder)
    for each in made:
        with contextlib.suppress(OSError):  # a job has started to use it
            Path(each).rmdir()


def _contents(opened: Storage) -> dict[str, Any]:
    try:
        entries = inspection.entries(opened)
    except UnknownCommitError:  # the root does not exist yet
        entries = []
    usable = next((entry for entry in entries if entry.is_whole), None)
    root = Path(opened.url.removeprefix("file://"))
    local = [root, *root.parents] if opened.url.startswith("file://") else []
    existing = next((folder for folder in local if folder.exists()), None)
    return {
        "url": opened.url,
        "commits": Counter(entry.state for entry in entries),
        "broken": sum(not entry.is_whole and entry.state != "incomplete" for entry in entries),
        "newest": usable and {"commit": usable.commit, "time": usable.time, "bytes": usable.bytes},
        "claim": Claims(opened, job="", host="", clock=SYSTEM_CLOCK).newest(),
        "free": shutil.disk_usage(existing).free if existing is not None else None,
        "made": [str(folder) for folder in local if not folder.exists()],
    }


def _write(opened: Storage, path: str) -> dict[str, Any]:
    """Write a file and read it; return ``bytes``, the times, and whether the content is the ``same``."""
    buffer = allocate(_NBYTES)
    buffer[:] = np.random.default_rng().integers(0, 256, _NBYTES, dtype=np.uint8)  # cannot be compressed
    began = time.perf_counter()
    opened.write(path, buffer)
    written = time.perf_counter()
    back: Bytes = allocate(_NBYTES)
    read = opened.read_into(path, back)
    return {
        "bytes": _NBYTES,
        "write_seconds": written - began,
        "read_seconds": time.perf_counter() - written,
        "same": read.size == _NBYTES and bool(np.array_equal(back, buffer)),
    }


def _create(opened: Storage, folder: str) -> dict[str, Any]:
    """Let several writers create one file at the same time, and one more writer afterwards."""
    created, texts = f"{folder}/created", [f"writer {number}".encode() for number in range(_WRITERS)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        won = list(pool.map(lambda text: opened.create(created, text), texts))
    late = opened.create(created, b"late")
    winners = [text for text, mine in zip(texts, won, strict=True) if mine]
    return {
        "writers": _WRITERS,
        "winners": sum(won),
        "kept": not late and opened.read(created) in winners,
    }
