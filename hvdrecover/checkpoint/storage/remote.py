"""A checkpoint root on any fsspec file system that has no storage of its own here."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.storage.failures import failures
from hvdrecover.checkpoint.storage.interface import ReadBytes, Temporary
from hvdrecover.checkpoint.storage.pieces import transferred
from hvdrecover.errors import ConfigError

PIECE = 1 << 24  # bytes
_EXISTS = (errno.EEXIST, errno.EINVAL)  # the latter is s3fs's for a condition that does not hold
AT_ONCE = 8  # pieces that are under way; one connection to an object store is too slow for a fast link


class RemoteStorage:
    """Any other fsspec file system; a file that has been closed is taken to be whole and durable.

    Args:
        filesystem: the file system.
        root: the root's path in it.
        url: the root as messages show it, without credentials.
        piece: how much of a large file to transfer at a time, in bytes.
    """

    def __init__(self, filesystem: Any, root: str, url: str, piece: int = PIECE) -> None:
        self._fs = filesystem
        self._piece = piece
        self._root = root
        self._refuses = False  # to create what exists
        self.url = url

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def check(self) -> None:
        """Do nothing: `create` finds out, as this takes a file."""

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if there is no such folder."""
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
            return sorted(path.rsplit("/", 1)[-1] for path in paths)

    def size(self, path: str) -> int | None:
        """A file's size in bytes, or None if there is no such file."""
        with failures(self.url, path, "look at the file"):
            return self._size(path)

    def read(self, path: str) -> bytes:
        """A small file's content."""
        with failures(self.url, path, "read the file"):
            data: bytes = self._fs.cat_file(self._path(path))
            return data

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; less only where the file ends."""
        with failures(self.url, path, "read the file"):
            return self._read_pieces(path, buffer, start)

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file that is durable on return; a crash may leave a part of it."""
        with failures(self.url, path, "write the file"):
            self._make_folder(self._path(path).rsplit("/", 1)[0])
            with self._fs.open(self._path(path), "wb") as file:
                return _write_all(file, buffer)

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""
        with failures(self.url, path, "write the file"):
            self._make_folder(self._path(path).rsplit("/", 1)[0])
            self._fs.pipe_file(self._path(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""
        with failures(self.url, path, "create the file"):
            if self._size(path) is not None:
                return False
            self._make_folder(self._path(path).rsplit("/", 1)[0])
            try:
                self._fs.pipe_file(self._path(path), data, mode="create")
            except OSError:
                # Stores differ in how they say that there is such a file. It is the one from here if an
                # answer was lost on the way and the request was sent again.
                if self._size(path) is None:
                    raise
                return bool(self._fs.cat_file(self._path(path)) == data)
            self._check_refuses(path, data)
            return True

    def _check_refuses(self, path: str, data: bytes) -> None:
        """Make sure, once, that a file that is there is not created again, as some stores do."""
        if self._refuses:
            return
        try:
            self._fs.pipe_file(self._path(path), data, mode="create")
        except Exception as error:
            if isinstance(error, FileExistsError) or getattr(error, "errno", None) in _EXISTS:
                self._refuses = True
                return
            with suppress(Exception):  # an outage, say; who tries again creates it anew, and asks again
                self._fs.rm_file(self._path(path))
            raise
        self._fs.rm_file(self._path(path))
        raise ConfigError(
            self.url,
            "this storage creates a file that exists (it ignores If-None-Match, or knows no such condition), "
            "so two jobs could write to one root. Name a root on a storage with conditional writes.",
        )

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        with failures(self.url, path, "delete the file"):
            try:
                self._fs.rm_file(self._path(path))
            except FileNotFoundError:
                return

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""
        with failures(self.url, folder, "delete the folder"):
            try:
                self._fs.invalidate_cache()
                self._fs.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                return

    def temporaries(self) -> list[Temporary]:
        """None: a file is there when it has been closed, and shown then."""
        return []

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Do nothing: there are no such files."""

    def _make_folder(self, folder: str) -> None:
        self._fs.makedirs(folder, exist_ok=True)

    def _size(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def _read_pieces(self, path: str, buffer: Bytes, start: int) -> ReadBytes:
        nbytes = self._size(path)
        if nbytes is None:
            raise FileNotFoundError(f"there is no file '{path}'")
        wanted = buffer[: max(nbytes - start, 0)]

        def get(piece: Bytes, at: int) -> int:
            data = self._fs.cat_file(self._path(path), start=start + at, end=start + at + len(piece))
            piece[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            return len(data)

        # Other file systems don't say whether they may be used by several threads.
        at_once = AT_ONCE if self._fs.async_impl else 1
        digest, total = Digest(), 0
        for piece, count in transferred(wanted, self._piece, at_once, get):
            digest.update(piece[:count])
            total += count
            if count < len(piece):
                break
        return ReadBytes(total, digest.hex())


def _write_all(file: Any, buffer: Bytes) -> str:
    view, digest = buffer.data, Digest()
    while view:
        piece = view[:PIECE]
        written = file.write(piece)
        count = len(piece) if written is None else written  # paramiko says nothing, and writes all
        digest.update(piece[:count])
        view = view[count:]
    return digest.hex()
