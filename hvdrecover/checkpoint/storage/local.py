"""A checkpoint root in a folder of a POSIX file system.

A file is durable in this order: data, fsync, rename, fsync of the folder.
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
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint.arena import HUGE_PAGE, PAGE, Bytes
from hvdrecover.checkpoint.storage import FULL, TEMPORARY, Storage, transferred
from hvdrecover.errors import ConfigError

PIECE = 1 << 24  # bytes
# With one, the disk idles while the next piece is handed over; with twice as many, nothing was gained.
_WRITES_AT_ONCE = 2
_READS_AT_ONCE = 3
_libc = ctypes.CDLL(None, use_errno=True)

# FUSE programs that cannot hold a checkpoint root. They show an object store without hard links and without
# renames that are atomic on all hosts, or they cache other hosts' files: with sshfs, a job does not see for
# 20 s that another job has taken the root.
_BUCKETS = ("s3fs", "ossfs", "cosfs", "goofys", "mountpoint-s3", "gcsfuse", "blobfuse", "blobfuse2", "rclone")
UNSUPPORTED_MOUNTS = {"sshfs", *_BUCKETS}


class LocalStorage(Storage):
    """A folder of a POSIX file system; files and folders are fsynced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = f"file://{root}"

    def check(self) -> None:
        existing = next(folder for folder in (self._root, *self._root.parents) if folder.exists())
        program = fuse_program(*mount_of(existing))
        if program in UNSUPPORTED_MOUNTS:
            raise ConfigError(
                self.url,
                f"{program} caches other hosts' files or does not rename them atomically, so two jobs could "
                "write to this root. Name the storage itself by its URL (sftp://HOST/PATH, s3://BUCKET/PATH, "
                "gs://BUCKET/PATH or az://CONTAINER/PATH); that needs no mount.",
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
        with _opened_for(buffer, self._root / path, os.O_RDONLY) as file:

            def read(piece: Bytes, at: int) -> int:
                piece[::HUGE_PAGE] = 0  # allocate the memory first, so the disk does not wait for it
                return file.transfer(lambda fd, data, at: os.preadv(fd, [data], at), piece, start + at)

            yield from transferred(buffer, PIECE // 2, _READS_AT_ONCE, read)

    def _write_pieces(self, path: str, buffer: Bytes) -> Iterator[Bytes]:
        target = self._inside(path)
        _make_folder(target.parent)
        with _opened_for(buffer, target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as file:
            _reserve(file.cached, len(buffer))

            # DONTNEED begins to write cached bytes to the disk, and drops written ones from the page cache.
            def write(piece: Bytes, at: int) -> int:
                count = file.transfer(os.pwrite, piece, at)
                os.posix_fadvise(file.cached, at, count, os.POSIX_FADV_DONTNEED)
                return count

            for piece, count in transferred(buffer, PIECE, _WRITES_AT_ONCE, write):
                if count < len(piece):
                    raise OSError(errno.EIO, "the file system accepts no more bytes")
                yield piece
            os.fsync(file.cached)
            os.posix_fadvise(file.cached, 0, len(buffer), os.POSIX_FADV_DONTNEED)
        _sync_folder(target.parent)

    def _publish(self, path: str, data: bytes, *, exclusive: bool) -> bool:
        target = self._inside(path)
        _make_folder(target.parent)
        # The name has no process number: two containers on a shared file system may have the same one.
        temporary = target.with_name(TEMPORARY + uuid.uuid4().hex)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if exclusive:
                os.link(temporary, target)  # unlike a rename, this fails if the name exists
            else:
                temporary.replace(target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    def _remove(self, path: str) -> None:
        target = self._inside(path)
        if os.path.lexists(target):  # or a read-only file system would fail
            target.unlink()
            _sync_folder(target.parent)

    def _delete(self, folder: str) -> None:
        target = self._inside(folder)
        if os.path.lexists(target):
            while os.path.lexists(target):
                with suppress(FileNotFoundError):  # another process deletes it at the same time
                    shutil.rmtree(target)
            _sync_folder(target.parent)

    def _inside(self, path: str) -> Path:
        """Return the absolute path; refuse a symbolic link to a folder, which may lead out of the root."""
        target = self._root / path
        for folder in target.parents[: len(target.parts) - len(self._root.parts) - 1]:
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "the folder is a symbolic link", str(folder))
        return target


@contextmanager
def _opened_for(buffer: Bytes, path: Path, flags: int) -> Iterator[_File]:
    with ExitStack() as stack:
        file = _File(stack.enter_context(_opened(path, flags)))
        if len(buffer) >= PAGE and buffer.ctypes.data % PAGE == 0:
            # Bypassing the page cache costs next to no processor time, and evicts nothing from memory. Some
            # network and overlay file systems do not allow it.
            try:
                file.direct = stack.enter_context(_opened(path, flags & ~os.O_CREAT | os.O_DIRECT))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        yield file


@dataclass
class _File:
    cached: int  # descriptor
    direct: int | None = None  # another descriptor with ``O_DIRECT``, as long as that works

    def transfer(self, call: Callable[[int, memoryview, int], int], piece: Bytes, start: int) -> int:
        """Read or write a piece at an offset; return the number of bytes, fewer only at the end."""
        done = 0
        while done < len(piece):
            rest, offset = piece[done:].data, start + done
            pages = len(rest) // PAGE * PAGE
            if self.direct is not None and pages and offset % PAGE == 0:
                try:
                    count = call(self.direct, rest[:pages], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.direct = None  # some file systems refuse O_DIRECT only now
                    continue
            else:
                count = call(self.cached, rest, offset)
            if not count:
                break
            done += count
        return done


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _reserve(file: int, nbytes: int) -> None:
    """Empty a file, give it its size and, where the file system can, its blocks on the disk."""
    # If blocks are reserved, no piece waits for the one before it, and a full disk fails at once.
    os.ftruncate(file, 0)
    # Not `os.posix_fallocate`: where the file system cannot reserve, glibc writes into each block instead.
    if nbytes and _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        error = ctypes.get_errno()
        if error in FULL:
            os.ftruncate(file, 0)
            raise OSError(error, os.strerror(error))
        os.ftruncate(file, nbytes)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents durable."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    try:
        _sync_folder(folder.parent)
    except OSError:
        folder.rmdir()  # or the next attempt would find it, and assume that its entry is durable
        raise


def _sync_folder(folder: Path) -> None:
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def mount_of(folder: Path) -> tuple[str, str]:
    """Return the source and the type of the mount on which a folder lies, such as ``/dev/sda1``, ``ext4``."""
    folder = folder.resolve()
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        # A path has ``\040`` for a space there.
        found = [fields for fields in lines if folder.is_relative_to(fields[1].replace("\\040", " "))]
        source, _, kind, *_ = max(reversed(found), key=lambda fields: len(fields[1]))
        return source, kind
    return "", ""


def fuse_program(source: str, kind: str) -> str:
    """Return the program of a FUSE mount; empty for other mounts."""
    if kind == "fuse":
        return source.partition("#")[0]  # s3fs#bucket, as in older lines of fstab
    return kind.removeprefix("fuse.") if kind.startswith("fuse.") else ""
