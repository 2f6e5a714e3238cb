"""A checkpoint root on any fsspec file system that has no storage of its own here."""

from __future__ import annotations

from typing import Any

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.storage.failures import failures
from hvdrecover.checkpoint.storage.interface import ReadBytes

_PIECE = 1 << 24  # bytes


class RemoteStorage:
    """Any other fsspec file system; a file that has been closed is taken to be whole and durable."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._fs = filesystem
        self._root = root
        self.url = url

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if there is no such folder."""
        with failures(self.url, folder, "list the folder"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            # An object store may list the folder among its content.
            paths = {name.strip("/") for name in found} - {self._path(folder).strip("/")}
            return sorted(path.rsplit("/", 1)[-1] for path in paths)

    def size(self, path: str) -> int | None:
        """A file's size in bytes, or None if there is no such file."""
        with failures(self.url, path, "look at the file"):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(self._path(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return int(info["size"]) if info["type"] == "file" else None

    def read(self, path: str) -> bytes:
        """A small file's content."""
        with failures(self.url, path, "read the file"):
            data: bytes = self._fs.cat_file(self._path(path))
            return data

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; less only where the file ends."""
        with failures(self.url, path, "read the file"), self._fs.open(self._path(path), "rb") as file:
            if start:
                file.seek(start)
            return _fill(file, buffer)

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file that is durable on return; a crash may leave a part of it."""
        with failures(self.url, path, "write the file"):
            self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
            with self._fs.open(self._path(path), "wb") as file:
                return _write_all(file, buffer)

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""
        with failures(self.url, path, "write the file"):
            self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(self._path(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""
        if self.size(path) is not None:
            return False
        with failures(self.url, path, "create the file"):
            self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
            try:
                self._fs.pipe_file(self._path(path), data, mode="create")
            except FileExistsError:
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
        """Delete a folder and all below it, if it exists."""
        with failures(self.url, folder, "delete the folder"):
            try:
                self._fs.invalidate_cache()
                self._fs.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                return

    def tidy(self) -> None:
        """Do nothing: a file is there when it has been closed, and shown then."""


def _fill(file: Any, buffer: Bytes) -> ReadBytes:
    view, digest, filled = buffer.data, Digest(), 0
    while filled < len(view):
        count = file.readinto(view[filled : filled + _PIECE])
        if not count:
            break
        digest.update(view[filled : filled + count])
        filled += count
    return ReadBytes(filled, digest.hex())


def _write_all(file: Any, buffer: Bytes) -> str:
    view, digest = buffer.data, Digest()
    while view:
        piece = view[:_PIECE]
        written = file.write(piece)
        count = len(piece) if written is None else written  # paramiko says nothing, and writes all
        digest.update(piece[:count])
        view = view[count:]
    return digest.hex()
