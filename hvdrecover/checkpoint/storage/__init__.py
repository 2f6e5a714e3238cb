"""Storages: the places of durable commits, on a local disk or any fsspec file system.

Paths are relative to the checkpoint root and use ``/``. Every failure of a storage is a `StorageError`.
"""

from __future__ import annotations

import errno
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from hvdrecover.checkpoint import CommitId, redact
from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.errors import ConfigError, HvdrecoverError, StorageError
from hvdrecover.machine import Clock

TEMPORARY = ".hvdrecover-"  # prefix of files that are still being written; `names` leaves them out
FULL = {errno.ENOSPC, errno.EDQUOT}
ATTEMPTS = 5  # where somebody waits for the result: 4 to 8 seconds of pauses

# A private generator: drawing from the global one would change the numbers that the script draws.
_dice = random.Random()
P = ParamSpec("P")
T = TypeVar("T")


class ReadBytes(NamedTuple):
    """The number of bytes that were read, and their digest."""

    size: int
    digest: str


class Temporary(NamedTuple):
    """A file that `Storage.names` does not show: it is being written, or a killed process left it."""

    path: str
    folder: str  # the folder below the root that the file belongs to; empty for the root itself
    nbytes: int
    handle: Any = None  # the storage's own identity of an unfinished upload


class Storage(ABC):
    """The files below one checkpoint root."""

    # Subclasses implement the methods with an underscore. The public methods turn their errors into
    # `StorageError`, compute digests and hide temporary files.
    url: str  # as messages show it, without credentials

    def check(self) -> None:  # noqa: B027
        """Raise `ConfigError` if two jobs could write at the same time; called before a job's first claim."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly below a folder, sorted; empty if the folder does not exist."""
        with self._failures(folder, "list the folder"):
            return sorted(name for name in self._names(folder) if not name.startswith(TEMPORARY))

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, or None if it does not exist."""
        with self._failures(path, "look at the file"):
            return self._size(path)

    def read(self, path: str) -> bytes:
        with self._failures(path, "read the file"):
            return self._read(path)

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; fewer only at the end of the file."""
        with self._failures(path, "read the file"):
            digest, total = xxhash.xxh3_128(), 0
            for piece, count in self._read_pieces(path, buffer, start):
                digest.update(piece[:count].data)
                total += count
                if count < len(piece):
                    break
            return ReadBytes(total, digest.hexdigest())

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file and return its digest. It is durable on return; a crash may leave a part of it."""
        with self._failures(path, "write the file"):
            digest = xxhash.xxh3_128()
            for piece in self._write_pieces(path, buffer):
                digest.update(piece.data)
            return digest.hexdigest()

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return; readers see all of it or nothing."""
        with self._failures(path, "write the file"):
            self._publish(path, data, exclusive=False)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, but if the file exists, change nothing and return False."""
        # If an answer is lost and the client repeats the request, a file that this call made may give False.
        with self._failures(path, "create the file"):
            return self._publish(path, data, exclusive=True)

    def remove(self, path: str) -> None:
        with self._failures(path, "delete the file"), suppress(FileNotFoundError):
            self._remove(path)

    def delete(self, folder: str) -> None:
        with self._failures(folder, "delete the folder"), suppress(FileNotFoundError):
            self._delete(folder)

    def temporaries(self) -> list[Temporary]:
        with self._failures("", "look for temporary files"):
            return self._temporaries()

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Delete the temporary files of folders that are ``stale``; see `Temporary.folder`."""
        with self._failures("", "delete temporary files"):
            for each in self._temporaries():
                if stale(each.folder):
                    with suppress(FileNotFoundError):
                        self._discard(each)

    def _failures(self, path: str, action: str) -> AbstractContextManager[None]:
        return failures(self.url, path, action)

    @abstractmethod
    def _names(self, folder: str) -> Iterable[str]: ...

    @abstractmethod
    def _size(self, path: str) -> int | None: ...

    @abstractmethod
    def _read(self, path: str) -> bytes: ...

    @abstractmethod
    def _read_pieces(self, path: str, buffer: Bytes, start: int) -> Iterator[tuple[Bytes, int]]:
        """Fill ``buffer`` piece by piece, in order; yield each piece and how many of its bytes were read."""

    @abstractmethod
    def _write_pieces(self, path: str, buffer: Bytes) -> Iterator[Bytes]:
        """Write ``buffer`` piece by piece, in order; yield each piece that is written."""

    @abstractmethod
    def _publish(self, path: str, data: bytes, *, exclusive: bool) -> bool:
        """Return whether the file was written; False if ``exclusive`` and it exists."""

    @abstractmethod
    def _remove(self, path: str) -> None: ...

    @abstractmethod
    def _delete(self, folder: str) -> None: ...

    def _temporaries(self) -> list[Temporary]:
        found = []
        # Not in other folders: this user may not be allowed to read `lost+found`.
        ours = [name for name in self._names("") if name == "claims" or CommitId.parse(name)]
        for folder in ["", *ours]:
            for name in self._names(folder):
                path = f"{folder}/{name}" if folder else name
                if name.startswith(TEMPORARY) and (nbytes := self._size(path)) is not None:
                    found.append(Temporary(path, folder, nbytes))
        return sorted(found)

    def _discard(self, temporary: Temporary) -> None:
        self._remove(temporary.path)


@contextmanager
def failures(url: str, path: str, action: str) -> Iterator[None]:
    """Turn the errors of a file system into `StorageError`, without credentials."""
    try:
        yield
    except HvdrecoverError:
        raise
    except Exception as error:
        reason = redact(str(error)) or type(error).__name__
        remedy = "Check the path, the permissions and the state of the storage."
        where = f"{url}/{path}" if path else url
        raise StorageError(where, f"could not {action}: {reason}. {remedy}") from error


def is_full(error: StorageError) -> bool:
    return getattr(error.__cause__, "errno", None) in FULL


def retried(clock: Clock, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; call it again after each `StorageError`, up to `ATTEMPTS` times in all."""
    for attempt in range(1, ATTEMPTS):
        try:
            return function(*args, **kwargs)
        except StorageError:
            clock.wait(threading.Event(), pause_before(attempt))
    return function(*args, **kwargs)


def pause_before(attempt: int) -> float:
    """Return how many seconds to wait before the ``attempt``-th retry, counted from 1."""
    # Up to half is taken off at random: jobs that lost one storage together should not come back together.
    return min(30.0, 0.5 * 2.0 ** min(attempt - 1, 10)) * _dice.uniform(0.5, 1.0)


def transferred(
    buffer: Bytes, size: int, at_once: int, transfer: Callable[[Bytes, int], T]
) -> Iterator[tuple[Bytes, T]]:
    """Transfer a buffer piece by piece; yield each piece and its result, in order."""
    if 0 < len(buffer) <= size:  # most files; no thread is needed
        yield buffer, transfer(buffer, 0)
        return
    # While the caller has one piece, ``at_once`` others are under way, each in a thread.
    under_way: deque[tuple[Bytes, Future[T]]] = deque()
    try:
        starts = iter(range(0, len(buffer), size))
        while True:
            for start in islice(starts, at_once + 1 - len(under_way)):
                piece = buffer[start : start + size]
                under_way.append((piece, _in_thread(transfer, piece, start)))
            if not under_way:
                return
            piece, future = under_way.popleft()
            yield piece, future.result()
    finally:
        # The first error is raised when no piece is under way any more.
        wait([future for _, future in under_way])


def _in_thread(transfer: Callable[[Bytes, int], T], piece: Bytes, start: int) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(transfer(piece, start))
        except BaseException as error:
            future.set_exception(error)

    # Not a ThreadPoolExecutor: at exit, Python waits for its threads, so a storage that hangs would keep a
    # finished process alive. Python does not wait for daemon threads.
    threading.Thread(target=work, name="hvdrecover-transfer", daemon=True).start()
    return future


# -- opening a storage by its URL ------------------------------------------------------------------

_SFTP = {"sftp", "ssh"}


def open_storage(url: str) -> Storage:
    """Open the storage of a path or an fsspec URL; nothing is read or written, SFTP does not connect yet."""
    return storage_in(*open_filesystem(url, "checkpoint"), redact(url))


def open_filesystem(url: str, name: str) -> tuple[Any, str]:
    """Return fsspec's file system for a path or a URL, and the path in it; errors call the URL ``name``."""
    shown = redact(url)
    with failures(shown, "", "open the storage"):
        try:
            return _opened(url)
        except (ValueError, ImportError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(name, f"'{shown}' can't be opened: {redact(str(error))}") from error


def storage_in(filesystem: Any, path: str, shown: str) -> Storage:
    """Return the storage of a folder in an fsspec file system; ``shown`` is its URL without credentials."""
    # These modules import this one; and only SFTP needs paramiko.
    from hvdrecover.checkpoint.storage import local, remote

    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else {*filesystem.protocol}
    if "file" in protocols:
        return local.LocalStorage(Path(path).absolute())
    kind = remote.S3Storage if "s3" in protocols else remote.RemoteStorage
    if protocols & _SFTP:
        kind = import_module("hvdrecover.checkpoint.storage.sftp").SftpStorage
    return kind(filesystem, path.rstrip("/"), shown.rstrip("/"))


def _opened(url: str) -> tuple[Any, str]:
    protocols = [part.partition("://")[0] for part in url.split("::")]
    is_url = "://" in url.partition("::")[0] or protocols[0] in known_implementations
    if protocols[0] in LocalFileSystem.protocol or not is_url:
        # `url_to_fs` would take a '::' in a path for the start of another URL.
        return fsspec.filesystem("file"), LocalFileSystem._strip_protocol(url)
    if not _SFTP.intersection(protocols):
        # Other processes change the root, too.
        options = {"use_listings_cache": False} if protocols[0] in ("s3", "s3a") else {}
        return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
    if len(protocols) > 1:  # there, host keys would not be checked
        raise ConfigError(redact(url), "an SFTP server can't be reached through another file system")
    try:
        from hvdrecover.checkpoint.storage.sftp import StrictSftpFileSystem as Sftp
    except ImportError as error:
        raise ImportError(f"SFTP needs paramiko: pip install 'hvdrecover[sftp]' ({error})") from error
    return Sftp(**Sftp._get_kwargs_from_urls(url)), Sftp._strip_protocol(url)
