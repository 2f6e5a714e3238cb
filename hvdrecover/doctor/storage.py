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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover.checkpoint import inspection
from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.store import check_is_ours
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import StorageError, UnknownCommitError

NBYTES = 1 << 25  # size of the file that a trial writes and reads
_WRITERS = 4  # writers that create one file at the same time


class Trial:
    """A checkpoint root that is tried out; with the folder of an earlier trial, to close that."""

    def __init__(self, url: str, folder: str = "") -> None:
        self._storage = open_storage(url)
        self.url = self._storage.url
        self.folder = folder or f"{TEMPORARY}doctor-{uuid.uuid4().hex}"
        self.path = f"{self.folder}/written"
        check_is_ours(self._storage)

    def look(self) -> dict[str, Any]:
        """Return the contents of the root; ``docs/doctor.md`` describes the keys."""
        try:
            entries = inspection.entries(self._storage)
        except UnknownCommitError:  # the root does not exist yet
            entries = []
        usable = next((entry for entry in entries if entry.is_whole), None)
        newest = usable and {"commit": usable.commit, "time": usable.time, "bytes": usable.bytes}
        root = Path(self.url.removeprefix("file://"))
        local = [root, *root.parents] if self.url.startswith("file://") else []
        existing = next((folder for folder in local if folder.exists()), None)
        return {
            "url": self.url,
            "folder": self.folder,
            "path": self.path,
            "commits": Counter(entry.state for entry in entries),
            "broken": sum(not entry.is_whole and entry.state != "incomplete" for entry in entries),
            "newest": newest,
            "claim": Claims(self._storage, job="", host="", clock=SYSTEM_CLOCK).newest(),
            "free": shutil.disk_usage(existing).free if existing is not None else None,
            "made": [str(folder) for folder in local if not folder.exists()],
        }

    def write(self, nbytes: int = NBYTES) -> dict[str, Any]:
        """Write a file and read it; returns ``bytes``, the times, and whether the content is the ``same``."""
        buffer = allocate(nbytes)
        buffer[:] = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)  # cannot be compressed
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

    def create(self) -> dict[str, Any]:
        """Let several writers create one file at the same time, and one more writer afterwards."""
        created, texts = f"{self.folder}/created", [f"writer {number}".encode() for number in range(_WRITERS)]
        with ThreadPoolExecutor(_WRITERS) as pool:
            won = list(pool.map(lambda text: self._storage.create(created, text), texts))
        late = self._storage.create(created, b"late")
        winners = [text for text, mine in zip(texts, won, strict=True) if mine]
        kept = not late and self._storage.read(created) in winners
        return {"writers": _WRITERS, "winners": sum(won), "kept": kept}

    def close(self, made: Sequence[str] = ()) -> None:
        """Remove everything that the trial created; ``made`` are folders that did not exist before it."""
        self._storage.delete(self.folder)
        for folder in made:
            with contextlib.suppress(OSError):  # a job has started to use it
                Path(folder).rmdir()


def root(url: str) -> dict[str, Any]:
    """Return the contents of a root, and what came of a trial; its file is left for other hosts to see."""
    trial = Trial(url)
    found = trial.look()
    try:
        return {**found, **trial.write(), **trial.create(), "refused": ""}
    except StorageError as error:
        return {**found, "refused": str(error)}
