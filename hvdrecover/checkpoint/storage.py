"""The few things that durable commits ask of a storage, over any fsspec file system.

Paths are relative to the checkpoint root and use ``/``. Every failure of the storage is a `StorageError`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import fsspec

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.errors import ConfigError, HvdrecoverError, StorageError

# A user and password, also if the password has a '@' or a '/' in it (but a port is no password); a query.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s@:]*:(?!\d+/)[^\s@]*@)")
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")
_TEMPORARY = ".hvdrecover-"
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Storage(Protocol):
    """One checkpoint root.

    Attributes:
        url: the root as messages show it, without credentials.
    """

    url: str

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if there is no such folder."""

    def size(self, path: str) -> int | None:
        """A file's size in bytes, or None if there is no such file."""

    def read(self, path: str) -> bytes:
        """A small file's content."""

    def read_into(self, path: str, buffer: Bytes) -> int:
        """Fill ``buffer`` from the start of a file; return how many bytes were read."""

    def write(self, path: str, buffer: Bytes) -> None:
        """Write a file that is durable on return; a crash may leave a part of it."""

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""


def open_storage(url: str) -> Storage:
    """The storage behind a path or an fsspec URL. Nothing is read or written yet.

    Raises:
        ConfigError: no file system is known for the URL, or a package that it needs is not installed.
        StorageError: a server that has to be connected to can't be reached.
    """
    shown = redact(url)
    with _failures(shown, "", "open the storage"):
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError("checkpoint", f"'{shown}' can't be opened: {redact(str(error))}") from error
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)
    if "file" in protocols:
        return LocalStorage(Path(path).absolute())
    return RemoteStorage(filesystem, path.rstrip("/"), shown.rstrip("/"))


def redact(url: str) -> str:
    """A URL, or a text with URLs, without user names, passwords and queries, which may hold tokens."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", url))


@contextmanager
def _failures(url: str, path: str, action: str) -> Iterator[None]:
    """Turn what the file system raises into a `StorageError`."""
    try:
        yield
    except HvdrecoverError:
        raise
    except Exception as error:
        reason = redact(str(error)) or type(error).__name__
        where = f"{url}/{path}" if path else url
        remedy = "Check the path, the permissions and the state of the storage."
        raise StorageError(where, f"could not {action}: {reason}. {remedy}") from error


class LocalStorage:
    """A folder of a POSIX file system; files and folders are fsynced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = f"file://{root}"

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if there is no such folder."""
        with _failures(self.url, folder, "list the folder"):
            try:
                found = [entry.name for entry in (self._root / folder).iterdir()]
            except FileNotFoundError:
                return []
            # What a process that was killed left of a `publish` is nobody's business.
            return sorted(name for name in found if not name.startswith(_TEMPORARY))

    def size(self, path: str) -> int | None:
        """A file's size in bytes, or None if there is no such file."""
        with _failures(self.url, path, "look at the file"):
            try:
                status = (self._root / path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str) -> bytes:
        """A small file's content."""
        with _failures(self.url, path, "read the file"):
            return (self._root / path).read_bytes()

    def read_into(self, path: str, buffer: Bytes) -> int:
        """Fill ``buffer`` from the start of a file; return how many bytes were read."""
        with _failures(self.url, path, "read the file"), (self._root / path).open("rb", buffering=0) as file:
            return _fill(file, buffer)

    def write(self, path: str, buffer: Bytes) -> None:
        """Write a file that is durable on return; a crash may leave a part of it."""
        with _failures(self.url, path, "write the file"):
            target = self._root / path
            self._make_folder(target.parent)
            with target.open("wb", buffering=0) as file:
                _write_all(file, buffer.data)
                os.fsync(file.fileno())
            _sync_folder(target.parent)

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""
        with _failures(self.url, path, "write the file"):
            target = self._root / path
            with self._written_aside(target, data) as temporary:
                temporary.replace(target)
            _sync_folder(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""
        with _failures(self.url, path, "create the file"):
            target = self._root / path
            try:
                with self._written_aside(target, data) as temporary:
                    _link(temporary, target, data)
            except FileExistsError:
                return False
            _sync_folder(target.parent)
            return True

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        with _failures(self.url, path, "delete the file"):
            try:
                (self._root / path).unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            _sync_folder((self._root / path).parent)

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""
        with _failures(self.url, folder, "delete the folder"):
            try:
                shutil.rmtree(self._root / folder)
            except FileNotFoundError:
                return
            _sync_folder((self._root / folder).parent)

    @contextmanager
    def _written_aside(self, target: Path, data: bytes) -> Iterator[Path]:
        """A temporary file beside a target; gone at the end, unless renamed."""
        self._make_folder(target.parent)
        # Not named after the process: two containers on a shared file system may have the same number.
        temporary = target.with_name(_TEMPORARY + uuid.uuid4().hex)
        try:
            _write_new(temporary, data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder, and the entries that lead to it durable."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


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
        with _failures(self.url, folder, "list the folder"):
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
        with _failures(self.url, path, "look at the file"):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(self._path(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return int(info["size"]) if info["type"] == "file" else None

    def read(self, path: str) -> bytes:
        """A small file's content."""
        with _failures(self.url, path, "read the file"):
            data: bytes = self._fs.cat_file(self._path(path))
            return data

    def read_into(self, path: str, buffer: Bytes) -> int:
        """Fill ``buffer`` from the start of a file; return how many bytes were read."""
        with _failures(self.url, path, "read the file"), self._fs.open(self._path(path), "rb") as file:
            return _fill(file, buffer)

    def write(self, path: str, buffer: Bytes) -> None:
        """Write a file that is durable on return; a crash may leave a part of it."""
        with _failures(self.url, path, "write the file"):
            self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
            with self._fs.open(self._path(path), "wb") as file:
                _write_all(file, buffer.data)

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""
        with _failures(self.url, path, "write the file"):
            self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(self._path(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""
        if self.size(path) is not None:
            return False
        with _failures(self.url, path, "create the file"):
            self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
            try:
                self._fs.pipe_file(self._path(path), data, mode="create")
            except FileExistsError:
                return False
            return True

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        with _failures(self.url, path, "delete the file"):
            try:
                self._fs.rm_file(self._path(path))
            except FileNotFoundError:
                return

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""
        with _failures(self.url, folder, "delete the folder"):
            try:
                self._fs.invalidate_cache()
                self._fs.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                return


def _fill(file: Any, buffer: Bytes) -> int:
    view, filled = buffer.data, 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            break
        filled += count
    return filled


def _write_all(file: Any, view: memoryview) -> None:
    while view:
        piece = view[: 1 << 26]
        written = file.write(piece)
        view = view[len(piece) if written is None else written :]  # paramiko says nothing, and writes all


def _write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, target: Path, data: bytes) -> None:
    """Give a file a second name; unlike a rename, this fails if there is such a name."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _write_new(target, data)  # as exclusive, but a crash may leave a part of it


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
