"""A checkpoint root in a folder of a POSIX file system.

A file is durable in this order: data, fsync, rename, fsync of the folder. Large files bypass the page cache
(``O_DIRECT``) where the file system allows it: that costs next to no processor time and evicts nothing from
memory. Other file systems, such as some network and overlay ones, are written through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hvdrecover.checkpoint.arena import HUGE_PAGE, Bytes
from hvdrecover.checkpoint.layout import PAGE
from hvdrecover.checkpoint.storage.interface import (
    FULL,
    TEMPORARY,
    Storage,
    Temporary,
    transferred,
)
from hvdrecover.errors import ConfigError

PIECE = 1 << 24  # bytes
# With one, the disk idles while the next piece is handed over; with twice as many, nothing was gained.
_WRITES_AT_ONCE = 2
_READS_AT_ONCE = 3
_libc = ctypes.CDLL(None, use_errno=True)

_S3, _GCS, _AZURE = "s3://BUCKET/PATH", "gs://BUCKET/PATH", "az://CONTAINER/PATH"
# FUSE programs that cannot hold a checkpoint root, and the URL to use instead. They show an object store
# without hard links and without renames that are atomic on all hosts, or they cache other hosts' files: with
# sshfs, a job does not see for 20 s that another job has taken the root.
QUIRKS = {
    "sshfs": "sftp://HOST/PATH",
    "s3fs": _S3,
    "ossfs": _S3,
    "cosfs": _S3,
    "goofys": _S3,
    "mountpoint-s3": _S3,
    "gcsfuse": _GCS,
    "blobfuse": _AZURE,
    "blobfuse2": _AZURE,
    "rclone": f"{_S3}, {_GCS}, {_AZURE} or sftp://HOST/PATH",
}


class LocalStorage(Storage):
    """A folder of a POSIX file system; files and folders are fsynced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = f"file://{root}"

    def check(self) -> None:
        """Refuse a mount that is in `QUIRKS`.

        Raises:
            ConfigError: the mount cannot hold a root.
        """
        existing = next(folder for folder in (self._root, *self._root.parents) if folder.exists())
        program = mount_of(existing).program
        if program in QUIRKS:
            raise ConfigError(
                self.url,
                f"{program} caches other hosts' files or does not rename them atomically, so two jobs could "
                f"write to this root. Name the storage itself, as {QUIRKS[program]}; that needs no mount.",
            )

    def _names(self, folder: str) -> list[str]:
        try:
            return [entry.name for entry in (self._root / folder).iterdir()]
        except FileNotFoundError:
            return []

    def _size(self, path: str) -> int | None:
        try:
            status = (self._root / path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def _read_pieces(self, path: str, buffer: Bytes, start: int) -> Iterator[tuple[Bytes, int]]:
        with _File(self._root / path, os.O_RDONLY, buffer) as file:

            def read(piece: Bytes, at: int) -> int:
                piece[::HUGE_PAGE] = 0  # allocate the memory first, so the disk does not wait for it
                return file.transfer(lambda fd, data, at: os.preadv(fd, [data], at), piece, start + at)

            yield from transferred(buffer, PIECE // 2, _READS_AT_ONCE, read)

    def _write_pieces(self, path: str, buffer: Bytes) -> Iterator[Bytes]:
        target = self._inside(path)
        self._make_folder(target.parent)
        with _File(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, buffer) as file:
            _reserve(file.cached, len(buffer))

            def write(piece: Bytes, at: int) -> int:
                count = file.transfer(os.pwrite, piece, at)
                file.forget(at, count)
                return count

            for piece, count in transferred(buffer, PIECE, _WRITES_AT_ONCE, write):
                if count < len(piece):
                    raise OSError(errno.EIO, "the file system accepts no more bytes")
                yield piece
            os.fsync(file.cached)
            file.forget(0, len(buffer))
        _sync_folder(target.parent)

    def _publish(self, path: str, data: bytes) -> None:
        with self._written_aside(path, data) as (temporary, target):
            temporary.replace(target)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            with self._written_aside(path, data) as (temporary, target):
                os.link(temporary, target)  # unlike a rename, this fails if the name exists
        except FileExistsError:
            if not os.path.lexists(self._root / path):  # a file exists where a folder should be
                raise
            return False
        return True

    def _remove(self, path: str) -> None:
        target = self._inside(path)
        if os.path.lexists(target):  # or a read-only file system would fail
            target.unlink()
            _sync_folder(target.parent)

    def _delete(self, folder: str) -> None:
        target = self._inside(folder)
        if not os.path.lexists(target):
            return
        while os.path.lexists(target):
            with suppress(FileNotFoundError):  # another process deletes it at the same time
                shutil.rmtree(target)
        _sync_folder(target.parent)

    def _temporaries(self) -> list[Temporary]:
        if not self._root.is_dir():
            return []
        found = []
        for folder in (self._root, *(entry for entry in self._root.iterdir() if _is_folder(entry))):
            name = "" if folder == self._root else folder.name
            for path in folder.glob(f"{TEMPORARY}*"):
                with suppress(FileNotFoundError):
                    if not _is_folder(path):
                        found.append(Temporary(f"{name}/{path.name}".lstrip("/"), name, path.lstat().st_size))
        return sorted(found)

    def _discard(self, temporary: Temporary) -> None:
        (self._root / temporary.path).unlink()

    def _inside(self, path: str) -> Path:
        """Return the absolute path; refuse a symbolic link to a folder, which may lead out of the root."""
        target = self._root / path
        for folder in target.parents[: len(target.parts) - len(self._root.parts) - 1]:
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "the folder is a symbolic link", str(folder))
        return target

    @contextmanager
    def _written_aside(self, path: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        """Write a temporary file beside a target; at the end, make the target's name durable."""
        target = self._inside(path)
        self._make_folder(target.parent)
        # The name has no process number: two containers on a shared file system may have the same one.
        temporary = target.with_name(TEMPORARY + uuid.uuid4().hex)
        try:
            with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                left = memoryview(data)
                while left:
                    left = left[os.write(file, left) :]
                os.fsync(file)
            yield temporary, target
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents durable."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        try:
            _sync_folder(folder.parent)
        except OSError:
            folder.rmdir()  # or the next attempt would find it, and assume that its entry is durable
            raise


class _File:
    """An open file, and the same file opened with ``O_DIRECT`` as long as that works.

    Attributes:
        cached: the descriptor that uses the page cache.
    """

    def __init__(self, path: Path, flags: int, buffer: Bytes) -> None:
        with ExitStack() as stack:
            self.cached = stack.enter_context(_opened(path, flags))
            self._direct: int | None = None
            if len(buffer) >= PAGE and buffer.ctypes.data % PAGE == 0:
                try:
                    self._direct = stack.enter_context(_opened(path, flags & ~os.O_CREAT | os.O_DIRECT))
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            self._stack = stack.pop_all()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def transfer(self, call: Callable[[int, memoryview, int], int], piece: Bytes, start: int) -> int:
        """Read or write a piece at an offset; return the number of bytes, fewer only at the end."""
        done = 0
        while done < len(piece):
            rest, offset = piece[done:].data, start + done
            pages = len(rest) // PAGE * PAGE
            if self._direct is not None and pages and offset % PAGE == 0:
                try:
                    count = call(self._direct, rest[:pages], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._direct = None  # some file systems refuse O_DIRECT only now
                    continue
            else:
                count = call(self.cached, rest, offset)
            if not count:
                break
            done += count
        return done

    def forget(self, start: int, count: int) -> None:
        """Begin to write cached bytes to the disk, and drop those that are written from the page cache."""
        os.posix_fadvise(self.cached, start, count, os.POSIX_FADV_DONTNEED)


# A data loader forks the training process, perhaps while the writer has files open. A fork without exec
# inherits all descriptors, and a deleted file keeps its blocks while one is open. So the child closes these.
_descriptors: set[int] = set()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _descriptors.add(descriptor)
    try:
        yield descriptor
    finally:
        _descriptors.discard(descriptor)  # before it is closed: its number may be another file's then
        os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_descriptors):
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _reserve(file: int, nbytes: int) -> None:
    """Empty a file, give it its size and, where the file system can, its blocks on the disk.

    No piece then waits for the one before it, and a full disk fails before the first piece.
    """
    os.ftruncate(file, 0)
    # Not `os.posix_fallocate`: where the file system cannot reserve, glibc writes into each block instead.
    if nbytes and _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        error = ctypes.get_errno()
        if error in FULL:
            os.ftruncate(file, 0)
            raise OSError(error, os.strerror(error))
        os.ftruncate(file, nbytes)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Mount(NamedTuple):
    """The mount on which a folder lies.

    Attributes:
        kind: the type of the file system, such as ``ext4`` or ``fuse.sshfs``; empty if unknown.
        source: the mounted device; some FUSE programs put their own name or a bucket's there.
    """

    kind: str
    source: str

    @property
    def program(self) -> str:
        """The program of a FUSE mount; empty for other mounts."""
        if self.kind == "fuse":
            return self.source.partition("#")[0]  # s3fs#bucket, as in older lines of fstab
        kind, _, program = self.kind.partition(".")
        return program if kind == "fuse" else ""


def mount_of(folder: Path) -> Mount:
    """Return the mount on which a folder lies."""
    device = folder.stat().st_dev
    with suppress(OSError):
        return parse_mounts(
            Path("/proc/self/mountinfo").read_text(), f"{os.major(device)}:{os.minor(device)}"
        )
    return Mount("", "")


def parse_mounts(mountinfo: str, number: str) -> Mount:
    """Return the mount of a device, ``major:minor``, from the text that proc_pid_mountinfo(5) describes."""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return Mount(*rest.split(" ")[:2])
    return Mount("", "")
