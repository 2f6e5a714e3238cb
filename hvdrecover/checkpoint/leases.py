"""Leases: a commit that is being read is not deleted.

A lease is a small file that a reader leaves in the root's folder ``readers``. Its name says which commit is
read and when the lease expires, so one listing tells all, and a lease is never half there::

    readers/g0003-c00000120-1700000600-0f3c….json

The reader writes its lease *first*, and then reads the manifest. Who deletes a commit removes its manifest
*first*, and then looks for leases: if there is one, it puts the manifest back and leaves the commit alone.
Of two that each set a sign and then look for the other's, at least one sees the other's. So whatever the
order of their steps, either the reader's look finds no manifest, and there is no commit for it; or the
deletion's look finds the lease, and every file stays until the lease has ended.

A reader that was killed leaves a lease that expires. Expiries are wall-clock times of another host, so they
are taken to lie `SKEW` later. A root that can't be written is read without a lease.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.root import READERS
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.clock import Clock
from hvdrecover.errors import StorageError

SPARE = 300.0  # seconds that a lease lasts at least beyond what it is needed for
SKEW = 300.0  # seconds by which the clocks of two hosts may differ
SLOWEST = 1 << 20  # bytes per second; readers slower than this are not waited for
_NAME = re.compile(r"(g[0-9]+-c[0-9]+)-([0-9]{1,12})-[0-9a-f]{32}\.json")


class Lease:
    """One reader's lease of one commit; see `reading`."""

    def __init__(self, storage: Storage, commit: CommitId, clock: Clock) -> None:
        self._storage = storage
        self._commit = commit
        self._clock = clock
        self._expires = 0
        self._path: str | None = None

    def last(self, nbytes: int = 0) -> None:
        """Make sure that the lease lasts while the next ``nbytes`` bytes are read."""
        needed = self._clock.now() + nbytes / SLOWEST + SPARE
        if self._expires < needed:
            self._renew(math.ceil(needed + SPARE))

    def end(self) -> None:
        """Give the lease back."""
        path, self._path = self._path, None
        if path is not None:
            with suppress(StorageError):  # it expires
                self._storage.remove(path)

    def _renew(self, expires: int) -> None:
        path = f"{READERS}/{self._commit.name}-{expires}-{uuid.uuid4().hex}.json"
        reader = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        try:
            self._storage.publish(path, reader)
        except StorageError:  # a root that this process can't write can still be read
            return
        self.end()
        self._path, self._expires = path, expires


@contextmanager
def reading(storage: Storage, commit: CommitId, clock: Clock) -> Iterator[Lease]:
    """Hold a lease of a commit; its manifest must be read inside, not before."""
    lease = Lease(storage, commit, clock)
    try:
        lease.last()
        yield lease
    finally:
        lease.end()


def is_read(storage: Storage, commit: CommitId, now: float) -> bool:
    """Return whether somebody holds a lease of a commit at ``now``, in seconds since the Unix epoch."""
    return any(found == commit and expires > now for _, found, expires in _all(storage))


def collect(storage: Storage, now: float) -> None:
    """Delete the leases that have expired at ``now``, in seconds since the Unix epoch."""
    for name, _, expires in _all(storage):
        if expires <= now:
            storage.remove(f"{READERS}/{name}")


def foreign(storage: Storage) -> list[str]:
    """Names in the readers' folder that are not leases."""
    return [name for name in storage.names(READERS) if _NAME.fullmatch(name) is None]


def _all(storage: Storage) -> Iterator[tuple[str, CommitId, float]]:
    """Each lease's name, its commit, and when it has expired whatever the skew."""
    for name in storage.names(READERS):
        match = _NAME.fullmatch(name)
        commit = CommitId.parse(match[1]) if match else None
        if match and commit is not None:
            yield name, commit, int(match[2]) + SKEW
