"""A checkpoint root on an SFTP server, with fsspec's settings and credentials.

Files are brought to the server's disk by OpenSSH's ``fsync@openssh.com``; a server that does not offer it is
taken at its word that a closed file is durable. A name is given to a finished file only: by a rename that
replaces (``posix-rename@openssh.com``, which the server must know), or by SFTP's own, which does not.
"""

from __future__ import annotations

import errno
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.storage.failures import failures
from hvdrecover.checkpoint.storage.interface import TEMPORARY, ReadBytes, Temporary
from hvdrecover.checkpoint.storage.pieces import transferred
from hvdrecover.checkpoint.storage.sftp_sessions import Session, Sessions

_PIECE = 1 << 23  # bytes
_AT_ONCE = 2  # while one session waits for its last answers, the other one sends


class SftpStorage:
    """A folder on an SFTP server.

    Args:
        filesystem: a `KnownHostsFileSystem`, connected or not.
        root: the folder's path on the server.
        url: the root as messages show it, without credentials.
        piece: how much of a large file to transfer at a time, in bytes.
    """

    def __init__(self, filesystem: Any, root: str, url: str, piece: int = _PIECE) -> None:
        self._piece = piece
        self._sessions = Sessions(filesystem)
        self._root = root
        self.url = url

    def check(self) -> None:
        """Do nothing: a server's answers are never remembered, and its rename does not replace."""

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if there is no such folder."""
        with self._session(folder, "list the folder") as session:
            try:
                found = session.listdir(self._path(folder))
            except FileNotFoundError:
                if _mode(session, self._path(folder)) is not None:
                    raise NotADirectoryError(errno.ENOTDIR, "it is not a folder") from None
                return []
            return sorted(name for name in found if not name.startswith(TEMPORARY))

    def size(self, path: str) -> int | None:
        """A file's size in bytes, or None if there is no such file."""
        with self._session(path, "look at the file") as session:
            try:
                status = session.stat(self._path(path))
            except FileNotFoundError:
                return None
            return int(status.st_size) if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str) -> bytes:
        """A small file's content."""
        with self._session(path, "read the file") as session, session.open(self._path(path), "rb") as file:
            data: bytes = file.read()
            return data

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; less only where the file ends."""
        with self._session(path, "read the file") as session:
            with session.open(self._path(path), "rb") as file:
                wanted, digest = buffer[: max(file.stat().st_size - start, 0)], Digest()
                for part in session.fill(file, wanted.data, start):
                    digest.update(part)
            return ReadBytes(len(wanted), digest.hex())

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file that is durable on return; a crash may leave a part of it."""
        target = self._path(path)

        def put(piece: Bytes, start: int) -> None:
            with self._sessions.session() as session, session.open_large(target, "r+b") as file:
                file.seek(start)
                _write(file, piece.data)

        with self._session(path, "write the file") as session:
            self._make_parent(session, target)
            digest = Digest()
            with session.open(target, "wb") as file:
                for piece, _ in transferred(buffer, self._piece, _AT_ONCE, put):
                    digest.update(piece)
                session.sync(file)
            session.sync_folder(_parent(target))
            return digest.hex()

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""
        with self._session(path, "write the file") as session:
            self._place(session, self._path(path), data, session.posix_rename)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""
        with self._session(path, "create the file") as session:
            if _mode(session, self._path(path)) is not None:
                return False
            try:
                self._place(session, self._path(path), data, session.rename)
            except OSError:
                # Servers say no more than that it failed.
                if _mode(session, self._path(path)) is None:
                    raise
                return False
            return True

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        with self._session(path, "delete the file") as session:
            with suppress(FileNotFoundError):
                self._check_is_folder(session, _parent(self._path(path)))
                session.remove(self._path(path))
                session.sync_folder(_parent(self._path(path)))

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""
        with self._session(folder, "delete the folder") as session:
            with suppress(FileNotFoundError):
                self._check_is_folder(session, self._path(folder))
                _delete(session, self._path(folder))
                session.sync_folder(_parent(self._path(folder)))

    def temporaries(self) -> list[Temporary]:
        """Return what is being written by `publish` and `create`, and what killed processes left of that."""
        with self._session("", "look for temporary files") as session:
            return [
                Temporary(path.removeprefix(f"{self._root}/"), folder, session.lstat(path).st_size or 0)
                for folder, path in self._hidden(session)
            ]

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Delete what killed processes left of `publish` and `create`."""
        with self._session("", "delete temporary files") as session:
            for folder, path in self._hidden(session):
                if stale(folder):
                    session.remove(path)

    def _hidden(self, session: Session) -> list[tuple[str, str]]:
        """Each temporary file's folder below the root, and its path."""
        folders = list(_folders(session, self._root))
        return [
            (folder.removeprefix(self._root).strip("/"), f"{folder}/{name}")
            for folder in [self._root, *folders]
            for name in session.listdir(folder)
            if name.startswith(TEMPORARY) and f"{folder}/{name}" not in folders
        ]

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _make_parent(self, session: Session, target: str) -> None:
        _make_folder(session, _parent(target))
        self._check_is_folder(session, _parent(target))

    def _check_is_folder(self, session: Session, folder: str) -> None:
        """Refuse to change anything by way of a link, which may lead out of the root; the root may be one."""
        if folder != self._root and not stat.S_ISDIR(session.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder, or a link to one")

    def _place(self, session: Session, target: str, data: bytes, rename: Callable[[str, str], None]) -> None:
        """Write a temporary file beside a target, and rename it when it is on the disk."""
        self._make_parent(session, target)
        temporary = f"{_parent(target)}/{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with session.open(temporary, "wb") as file:
                file.write(data)
                session.sync(file)
            rename(temporary, target)
        except OSError:
            with suppress(OSError):
                session.remove(temporary)
            raise
        session.sync_folder(_parent(target))

    @contextmanager
    def _session(self, path: str, action: str) -> Iterator[Session]:
        with failures(self.url, path, action), self._sessions.session() as session:
            yield session


def _parent(path: str) -> str:
    return path.rsplit("/", 1)[0] or "/"


def _mode(session: Session, path: str) -> int | None:
    """The kind and permissions of what is there, a symbolic link itself; None if there is nothing."""
    try:
        return int(session.lstat(path).st_mode)
    except FileNotFoundError:
        return None


def _folders(session: Session, folder: str) -> list[str]:
    """The folders directly below a folder; links to folders are none."""
    return [
        f"{folder}/{entry.filename}" for entry in session.listdir_attr(folder) if stat.S_ISDIR(entry.st_mode)
    ]


def _write(file: Any, data: memoryview) -> None:
    """Write without waiting for answers, but for the last one: paramiko then looks at all of them."""
    file.set_pipelined(True)
    file.write(data[:-1])
    file.set_pipelined(False)
    file.write(data[-1:])


def _make_folder(session: Session, folder: str) -> None:
    """Make a folder, and the entries that lead to it durable."""
    if _mode(session, folder) is not None:
        return
    _make_folder(session, _parent(folder))
    try:
        session.mkdir(folder)
    except OSError:
        if _mode(session, folder) is None:  # not made by another process just then
            raise
    session.sync_folder(_parent(folder))


def _delete(session: Session, folder: str) -> None:
    for entry in session.listdir_attr(folder):
        path = f"{folder}/{entry.filename}"
        if stat.S_ISDIR(entry.st_mode):
            _delete(session, path)
        else:
            session.remove(path)
    session.rmdir(folder)
