"""A checkpoint root on any fsspec file system, such as Google Cloud Storage or Azure."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.storage.interface import TEMPORARY, ReadBytes, Temporary, failures, transferred
from hvdrecover.errors import ConfigError

PIECE = 1 << 24  # bytes
AT_ONCE = 8  # pieces under way; one connection to an object store is too slow for a fast link
_EXISTS = (errno.EEXIST, errno.EINVAL)  # s3fs raises the latter for a condition that does not hold


class RemoteStorage:
    """A folder of an fsspec file system. A file that has been closed is assumed to be durable.

    Args:
        filesystem: the file system.
        root: the folder's path in it.
        url: the root as messages show it, without credentials.
        piece: bytes of a large file that are transferred at a time.
    """

    def __init__(self, filesystem: Any, root: str, url: str, piece: int = PIECE) -> None:
        self._fs = filesystem
        self._piece = piece
        self._root = root
        self.url = url

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def check(self) -> None:
        """Refuse a storage that creates a file twice: some ignore the condition, others do not know it.

        Raises:
            ConfigError: two jobs could claim this root.
        """
        probe = f"{TEMPORARY}{uuid.uuid4().hex}"
        with failures(self.url, "", "check that the storage creates a file only once"):
            self._make_folder(self._root)
            try:
                self._fs.pipe_file(self._path(probe), b"1", mode="create")
                try:
                    self._fs.pipe_file(self._path(probe), b"2", mode="create")
                except OSError as error:
                    if isinstance(error, FileExistsError) or error.errno in _EXISTS:
                        return
                    raise
            finally:
                self.remove(probe)
        raise ConfigError(
            self.url,
            "this storage creates a file that exists (it ignores If-None-Match, or knows no such condition), "
            "so two jobs could write to one root. Name a root on a storage with conditional writes.",
        )

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly below a folder, sorted; empty if the folder does not exist."""
        with failures(self.url, folder, "list the folder"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            # An object store may list the folder among its content; others list a file as its own content.
            paths = {name.strip("/") for name in found} - {self._path(folder).strip("/")}
            if found and not paths and self._size(folder) is not None:
                raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
            names = (path.rsplit("/", 1)[-1] for path in paths)
            return sorted(name for name in names if not name.startswith(TEMPORARY))

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, or None if it does not exist."""
        with failures(self.url, path, "look at the file"):
            return self._size(path)

    def read(self, path: str) -> bytes:
        """Return the content of a small file."""
        with failures(self.url, path, "read the file"):
            data: bytes = self._fs.cat_file(self._path(path))
            return data

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; fewer only at the end of the file."""
        with failures(self.url, path, "read the file"):
            nbytes = self._size(path)
            if nbytes is None:
                raise FileNotFoundError(f"there is no file '{path}'")
            wanted, digest, total = buffer[: max(nbytes - start, 0)], Digest(), 0

            def get(piece: Bytes, at: int) -> int:
                data = self._fs.cat_file(self._path(path), start=start + at, end=start + at + len(piece))
                piece[: len(data)] = np.frombuffer(data, dtype=np.uint8)
                return len(data)

            # Only asynchronous file systems can be used by several threads at a time.
            at_once = AT_ONCE if self._fs.async_impl else 1
            for piece, count in transferred(wanted, self._piece, at_once, get):
                digest.update(piece[:count])
                total += count
                if count < len(piece):
                    break
            return ReadBytes(total, digest.hex())

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file and return its digest. It is durable on return; a crash may leave a part of it."""
        with failures(self.url, path, "write the file"):
            self._make_folder(self._path(path).rpartition("/")[0])
            digest = Digest()
            with self._fs.open(self._path(path), "wb") as file:
                for start in range(0, len(buffer), PIECE):
                    piece = buffer[start : start + PIECE].data
                    if file.write(piece) not in (len(piece), None):  # some return None
                        raise OSError(errno.EIO, "the storage accepts no more bytes")
                    digest.update(piece)
            return digest.hex()

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return; readers see all of it or nothing."""
        with failures(self.url, path, "write the file"):
            self._make_folder(self._path(path).rpartition("/")[0])
            self._fs.pipe_file(self._path(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, but if the file exists, change nothing and return False."""
        with failures(self.url, path, "create the file"):
            self._make_folder(self._path(path).rpartition("/")[0])
            try:
                self._fs.pipe_file(self._path(path), data, mode="create")
            except OSError:
                if self._size(path) is None:  # storages differ in the error for a file that exists
                    raise
                return False
            return True

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        with failures(self.url, path, "delete the file"):
            try:
                self._fs.rm_file(self._path(path))
            except FileNotFoundError:
                return

    def delete(self, folder: str) -> None:
        """Delete a folder with its content, if it exists."""
        with failures(self.url, folder, "delete the folder"):
            self._fs.invalidate_cache()
            try:
                self._fs.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                return

    def temporaries(self) -> list[Temporary]:
        """Return nothing: a file appears when it is closed."""
        return []

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Do nothing; see `temporaries`."""

    def _make_folder(self, folder: str) -> None:
        self._fs.makedirs(folder, exist_ok=True)

    def _size(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None
