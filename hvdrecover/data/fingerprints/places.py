"""The places of training files: listing and reading them, on local disks and over fsspec."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.retrying import retrying
from hvdrecover.checkpoint.storage import Storage, open_filesystem, storage_in
from hvdrecover.checkpoint.storage.failures import failures
from hvdrecover.clock import Clock
from hvdrecover.data.fingerprints import patterns
from hvdrecover.errors import ConfigError
from hvdrecover.redaction import redact

Read = Callable[[Bytes, int], int]
"""Fills a buffer with a file's bytes from some position on; returns how many there were."""

# What stores call a digest of a file's bytes, or what they change with them; the best one first.
_TAGS = ("md5Hash", "crc32c", "content_md5", "ETag", "etag")
_EVERYTHING: tuple[str, ...] = ()  # the pattern that fits all
_LOCAL_AT_ONCE = 4
_REMOTE_AT_ONCE = 8
_SFTP_AT_ONCE = 4  # sessions; OpenSSH allows ten per connection, and a commit may be on its way over it


class Entry(NamedTuple):
    """A file: its path below the place's root, its size in bytes, and its tag with what that is called."""

    path: str
    size: int
    tag: tuple[str, str] | None = None


class Reader(Protocol):
    """Reads the files of a place; every failure is a `StorageError`.

    Attributes:
        at_once: by how many threads.
        samples: how many files are to be looked into when not all are.
        buffer: bytes to ask for at a time, by all threads together.
    """

    at_once: int
    samples: int
    buffer: int

    def open(self, path: str) -> AbstractContextManager[Read]:
        """Open a file."""


@dataclass(frozen=True)
class Place:
    """Files below one folder.

    Attributes:
        store: the file system, as URLs of it begin.
        root: the folder's path in it.
        entries: the files, in any order.
        reader: reads them.
    """

    store: str
    root: str
    entries: Sequence[Entry]
    reader: Reader


def look(url: str, clock: Clock) -> Place:
    """List what a path or an fsspec URL means: a file, a folder with all below it, or names with wildcards.

    Raises:
        ConfigError: there is nothing, or something that is neither a file nor a folder.
        StorageError: the storage failed.
    """
    filesystem, path = open_filesystem(url, "data")
    if "file" in _protocols(filesystem):
        return _look_at_local(path)
    return retrying(clock)(_look_at_remote, url, filesystem, path, clock)


def _look_at_local(path: str) -> Place:
    with failures(path, "", "look at the data"):
        if not os.path.lexists(path) and patterns.is_wild(path):
            root, pattern = patterns.split(path)
        elif Path(path).is_dir():
            root, pattern = path, _EVERYTHING
        else:
            root, name = os.path.split(path)
            return Place("file://", root, [_local_entry(path, name)], LocalReader(Path(root)))
        entries = list(_walk(root, pattern)) if Path(root).is_dir() else []
    return Place("file://", root, _some(entries, path), LocalReader(Path(root)))


def _local_entry(path: str, name: str) -> Entry:
    return Entry(name, _checked(path, _status(path)).st_size)


def _status(path: str | os.DirEntry[str]) -> os.stat_result:
    """The status of what a path leads to, links followed."""
    try:
        return path.stat() if isinstance(path, os.DirEntry) else Path(path).stat()
    except FileNotFoundError as error:
        if Path(path).is_symlink():
            raise _link_to_nothing(os.fspath(path)) from error
        raise ConfigError(
            "data", f"there is no file or folder '{os.fspath(path)}'; check the path"
        ) from error


def _checked(path: str, status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise _neither(path)
    return status


def _walk(root: str, pattern: Sequence[str]) -> Iterator[Entry]:
    """The files below a folder. Links are followed, except to folders that they are in."""
    left: list[tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = [((), (_identity(Path(root).stat()),))]
    while left:
        names, above = left.pop()
        folder = "/".join((root, *names))
        with failures(folder, "", "list the folder"), os.scandir(folder) as found:
            for entry in found:
                path = (*names, entry.name)
                if not patterns.leads(path, pattern):
                    continue
                status = _status(entry)
                if stat.S_ISDIR(status.st_mode):
                    if _identity(status) not in above:
                        left.append((path, (*above, _identity(status))))
                elif patterns.fits(path, pattern):
                    yield Entry("/".join(path), _checked(entry.path, status).st_size)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class LocalReader:
    """Reads files below a folder of a local file system, or of one that is mounted."""

    at_once = _LOCAL_AT_ONCE
    samples = 128
    buffer = 1 << 24

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def open(self, path: str) -> Iterator[Read]:
        """Open a file."""
        with failures(str(self._root), path, "read the file"):
            with (self._root / path).open("rb", buffering=0) as file:

                def read(buffer: Bytes, start: int) -> int:
                    done = 0
                    while done < len(buffer):
                        count = os.preadv(file.fileno(), [buffer[done:].data], start + done)
                        if not count:
                            break
                        done += count
                    return done

                yield read


def _look_at_remote(url: str, filesystem: Any, path: str, clock: Clock) -> Place:
    path = path.rstrip("/")
    store = redact(url.rstrip("/").removesuffix(path.lstrip("/")))
    shown = store + path.lstrip("/")
    with failures(shown, "", "look at the data"):
        # The storage's look comes first: it mends a lost connection.
        is_file = storage_in(filesystem, path, shown).size("") is not None
        root, pattern = path, _EVERYTHING
        if is_file:
            root, name = posixpath.split(path)
        elif patterns.is_wild(path) and not filesystem.exists(path):
            root, pattern = patterns.split(path)
        shown_root = store + root.strip("/")
        if is_file:
            entries = [_remote_entry(name, filesystem.info(path), shown_root)]
        elif "s3" in _protocols(filesystem):
            entries = list(_find(filesystem, root, pattern, shown_root))
        else:
            entries = list(_walk_remote(filesystem, root, pattern, shown_root))
    reader = RemoteReader(filesystem, storage_in(filesystem, root, shown_root), clock)
    return Place(store, root, _some(entries, shown), reader)


def _find(filesystem: Any, root: str, pattern: Sequence[str], shown: str) -> Iterator[Entry]:
    """The files below a prefix of an object store, listed without going through folders."""
    try:
        found = filesystem.find(root, detail=True)
    except FileNotFoundError:  # there is no such bucket
        return
    for name, info in found.items():
        path = name.removeprefix(root).strip("/")
        if info["type"] == "file" and not name.endswith("/") and patterns.fits(path.split("/"), pattern):
            yield _remote_entry(path, info, shown)


def _walk_remote(filesystem: Any, root: str, pattern: Sequence[str], shown: str) -> Iterator[Entry]:
    """The files below a folder. Unlike fsspec's own walk, this leaves out nothing that can't be listed."""
    filesystem.invalidate_cache()
    left: list[tuple[str, ...]] = [()]
    while left:
        names = left.pop()
        try:
            found = _listed(filesystem, "/".join((root, *names)))
        except FileNotFoundError:
            if names:  # it went away just now
                raise
            return
        for info in found:
            path = (*names, info["name"].rstrip("/").rpartition("/")[2])
            if not patterns.leads(path, pattern):
                continue
            if info["type"] == "link":
                info = _behind_link(filesystem, info["name"], "/".join((shown, *path)))
            if info["type"] == "directory":
                left.append(path)
            elif patterns.fits(path, pattern):
                yield _remote_entry("/".join(path), info, shown)


def _listed(filesystem: Any, folder: str) -> list[dict[str, Any]]:
    if "sftp" not in _protocols(filesystem):
        return list(filesystem.ls(folder, detail=True))
    found = filesystem.ftp.listdir_attr(folder)
    return [_sftp_info(f"{folder}/{status.filename}", status) for status in found]


def _sftp_info(path: str, status: Any) -> dict[str, Any]:
    """Return what fsspec says of a file on an SFTP server, which takes everything else for a file, too."""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    return {"name": path, "size": status.st_size, "type": kinds.get(stat.S_IFMT(status.st_mode), "other")}


def _behind_link(filesystem: Any, path: str, shown: str) -> Any:
    try:
        sftp = "sftp" in _protocols(filesystem)
        info = _sftp_info(path, filesystem.ftp.stat(path)) if sftp else filesystem.info(path)
    except FileNotFoundError as error:
        raise _link_to_nothing(shown) from error
    if info["type"] == "directory":
        # The server doesn't say which folder it is, so a circle of links would have no end.
        raise ConfigError(
            "data",
            f"'{shown}' is a link to a folder, which is not followed on a server; name that folder instead",
        )
    return info


def _remote_entry(path: str, info: Any, shown: str) -> Entry:
    if info["type"] != "file":
        raise _neither(f"{shown}/{path}")
    if info["size"] is None:
        raise ConfigError(
            "data", f"the server does not say how large '{shown}/{path}' is; pass a copy of the data"
        )
    tag = next(((name, str(info[name])) for name in _TAGS if info.get(name)), None)
    return Entry(path, int(info["size"]), tag)


class RemoteReader:
    """Reads files below a folder by way of the storage that is there for checkpoints."""

    samples = 16
    buffer = 1 << 27

    def __init__(self, filesystem: Any, storage: Storage, clock: Clock) -> None:
        sftp = "sftp" in _protocols(filesystem)
        # Other file systems don't say whether they may be used by several threads.
        self.at_once = _SFTP_AT_ONCE if sftp else _REMOTE_AT_ONCE if filesystem.async_impl else 1
        self._storage = storage
        self._clock = clock

    @contextmanager
    def open(self, path: str) -> Iterator[Read]:
        """Open a file."""

        def read(buffer: Bytes, start: int) -> int:
            return retrying(self._clock)(self._storage.read_into, path, buffer, start).size

        yield read


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return protocol if isinstance(protocol, tuple) else (protocol,)


def _some(entries: list[Entry], shown: str) -> list[Entry]:
    """An empty folder is most often one where nothing is mounted."""
    if not entries:
        raise ConfigError(
            "data", f"there are no files at '{shown}'; check the path, and what is mounted there"
        )
    return entries


def _link_to_nothing(shown: str) -> ConfigError:
    return ConfigError("data", f"'{shown}' is a link to nothing; restore what it leads to, or delete it")


def _neither(shown: str) -> ConfigError:
    return ConfigError("data", f"'{shown}' is neither a file nor a folder; pass paths that leave it out")
