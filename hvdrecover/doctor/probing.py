"""Trying out a checkpoint root, on the host whose process would write to it.

What is tried lies in a folder of its own in the root, under a name that no job looks at, and goes with the
probe. Commits, claims and leases are read only.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.inspection import catalog
from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.store import check_is_ours
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import UnknownCommitError

NBYTES = 1 << 25  # of the file whose writing and reading is timed
_RIVALS = 4  # that create one file at once
_WRITTEN = "written"
_CREATED = "created"


class Probe:
    """A checkpoint root that is tried out.

    Args:
        url: the root.

    Attributes:
        url: the root as messages show it.
        path: the file that `try_writing` leaves in the root until `close`, for other hosts to look for.

    Raises:
        ConfigError: no storage is known for the URL.
        StorageError: it can't be reached.
        ForeignRootError: the root holds other files.
    """

    def __init__(self, url: str) -> None:
        self._storage = open_storage(url)
        self.url = self._storage.url
        self._folder = f"{TEMPORARY}doctor-{uuid.uuid4().hex}"
        self.path = f"{self._folder}/{_WRITTEN}"
        check_is_ours(self._storage)
        self._made = _missing(self._storage)

    def look(self) -> dict[str, Any]:
        """Return what the root holds.

        Returns:
            ``commits``, by state; ``newest``: the newest usable one's name, time, host and size, or None;
            ``claim``: the newest claimed generation, or 0; ``free``: bytes, or None if it can't be told.
        """
        try:
            entries = catalog.entries(self._storage)
        except UnknownCommitError:  # nothing yet
            entries = []
        usable = [entry for entry in entries if entry.is_whole and entry.manifest]
        newest = None
        if usable and (manifest := usable[0].manifest) is not None:
            newest = {
                "commit": usable[0].id.name,
                "time": manifest.time,
                "host": manifest.writer.get("host"),
                "bytes": usable[0].nbytes,
            }
        claims = Claims(self._storage, job="", host="", clock=SYSTEM_CLOCK)
        return {
            "url": self.url,
            "commits": Counter(entry.state for entry in entries),
            "newest": newest,
            "claim": claims.newest(),
            "free": _free(self._storage),
        }

    def try_writing(self, nbytes: int = NBYTES) -> dict[str, Any]:
        """Write a file and read it back.

        Returns:
            ``bytes``, ``write_seconds``, ``read_seconds``, and whether what was read is the ``same``.

        Raises:
            StorageError: the storage has refused.
        """
        buffer = allocate(nbytes)
        buffer[:] = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)  # not to be compressed
        began = time.perf_counter()
        self._storage.write(self.path, buffer)
        written = time.perf_counter()
        back: Bytes = allocate(nbytes)
        read = self._storage.read_into(self.path, back)
        return {
            "bytes": nbytes,
            "write_seconds": written - began,
            "read_seconds": time.perf_counter() - written,
            "same": read.size == nbytes and bool(np.array_equal(back, buffer)),
        }

    def try_creating(self) -> dict[str, Any]:
        """Have several create one file at once, and one more afterwards.

        Returns:
            ``rivals``: how many tried; ``winners``: how many were told that the file is theirs; ``whole``:
            whether it holds what a winner wrote; ``kept``: whether it was left alone afterwards.

        Raises:
            StorageError: the storage has refused.
        """
        path = f"{self._folder}/{_CREATED}"
        texts = [f"rival {number}".encode() for number in range(_RIVALS)]
        won = _at_once([lambda text=text: self._storage.create(path, text) for text in texts])  # type: ignore[misc]
        content = self._storage.read(path)
        kept = not self._storage.create(path, b"late") and self._storage.read(path) == content
        whole = content in [text for text, mine in zip(texts, won, strict=True) if mine]
        return {"rivals": _RIVALS, "winners": sum(won), "whole": whole, "kept": kept}

    def close(self) -> None:
        """Remove all that was made."""
        for name in (_WRITTEN, _CREATED):  # one by one: of a deleted folder, a storage keeps what it can use
            self._storage.remove(f"{self._folder}/{name}")
        self._storage.delete(self._folder)
        for folder in self._made:
            with contextlib.suppress(OSError):  # somebody uses it by now
                folder.rmdir()


def sees(url: str, path: str) -> bool:
    """Return whether a file of a root is seen from this host.

    Raises:
        ConfigError: no storage is known for the URL here.
        StorageError: it can't be reached.
    """
    return open_storage(url).size(path) is not None


def _at_once(actions: list[Callable[[], bool]]) -> list[bool]:
    """Do several things at the same moment.

    Raises:
        Exception: what the first one of them has raised.
    """
    ready = threading.Barrier(len(actions))
    done: list[bool | Exception] = [False] * len(actions)

    def run(number: int) -> None:
        ready.wait()
        try:
            done[number] = actions[number]()
        except Exception as error:
            done[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in done:
        if isinstance(each, Exception):
            raise each
    return [bool(each) for each in done]


def _local(storage: Storage) -> Path | None:
    return Path(storage.url.removeprefix("file://")) if storage.url.startswith("file://") else None


def _missing(storage: Storage) -> list[Path]:
    """The folders that have to be made for a local root, the innermost first."""
    root = _local(storage)
    return [] if root is None else [folder for folder in (root, *root.parents) if not folder.exists()]


def _free(storage: Storage) -> int | None:
    """Free bytes for this user, if the storage can tell."""
    root = _local(storage)
    if root is None:
        return None
    return shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
