"""The few things that durable commits ask of a storage.

Paths are relative to the checkpoint root and use ``/``. Every failure of the storage is a `StorageError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from hvdrecover.checkpoint.arena import Bytes

TEMPORARY = ".hvdrecover-"  # how the names of files begin that are still being made; `names` leaves them out


class ReadBytes(NamedTuple):
    """The number of bytes read, and their digest, computed on the way."""

    size: int
    digest: str


class Temporary(NamedTuple):
    """A file that `Storage.names` does not show: one being written, or left by a killed process.

    Attributes:
        path: where it is, for people.
        folder: the folder below the root that it is, or was, a part of; empty if that is not known.
        nbytes: its size in bytes.
    """

    path: str
    folder: str
    nbytes: int


class Storage(Protocol):
    """One checkpoint root.

    Attributes:
        url: the root as messages show it, without credentials.
    """

    url: str

    def check(self) -> None:
        """Make sure that the storage can give what a root needs, as far as that is known without writing.

        Raises:
            ConfigError: it can't.
        """

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if there is no such folder."""

    def size(self, path: str) -> int | None:
        """A file's size in bytes, or None if there is no such file."""

    def read(self, path: str) -> bytes:
        """A small file's content."""

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; less only where the file ends."""

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file that is durable on return; a crash may leave a part of it.

        Returns:
            The digest of ``buffer``, computed on the way.
        """

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""

    def temporaries(self) -> list[Temporary]:
        """The files that `names` doesn't show, whoever has made them."""

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Delete those files that killed processes left.

        Args:
            stale: whether such files of a folder may go; it is given `Temporary.folder`.
        """
