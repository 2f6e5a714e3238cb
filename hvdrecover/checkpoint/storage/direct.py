"""Local files of any size, at the speed of the disk: past the page cache where the file system allows it.

Several pieces are transferred at a time, and while the disk is busy with them, the digest takes in those that
are done. Bytes that go past the page cache cost next to no processor time and drive nothing else out of
memory. File systems that refuse ``O_DIRECT`` (some network and overlay ones) are written through the page
cache, which is told to begin writing each piece at once, and to forget the file at the end.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hvdrecover.checkpoint.arena import HUGE_PAGE, Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.layout import PAGE
from hvdrecover.checkpoint.storage.descriptors import opened
from hvdrecover.checkpoint.storage.failures import FULL
from hvdrecover.checkpoint.storage.interface import ReadBytes
from hvdrecover.checkpoint.storage.pieces import transferred

PIECE = 1 << 24  # bytes
# With one, the disk idles while the next piece is handed over; with twice as many, nothing was gained.
_WRITES_AT_ONCE = 2
_READS_AT_ONCE = 3

_CANT_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS}
_libc = ctypes.CDLL(None, use_errno=True)

Transfer = Callable[[Bytes, int], int]


def write(path: Path, buffer: Bytes) -> str:
    """Write a file; it is on the disk on return.

    Args:
        path: the file; made, or written over unless it is a symbolic link. One of the same size keeps its
            blocks on the disk.
        buffer: its content. Only page-aligned memory can go past the page cache.

    Returns:
        The content's digest.
    """
    digest = Digest()
    with _File(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, buffer) as file, _giving_back(file.plain):
        _reserve(file.plain, len(buffer))
        for piece, count in _transferred(buffer, PIECE, _WRITES_AT_ONCE, file.write):
            if count < len(piece):
                raise OSError(errno.EIO, "the file system takes no more bytes, and does not say why")
            digest.update(piece)
        os.fsync(file.plain)
        file.forget(0, len(buffer))
    return digest.hex()


def read(path: Path, buffer: Bytes, start: int = 0) -> ReadBytes:
    """Fill a buffer with a file's bytes from ``start`` on; less only where the file ends."""
    digest, total = Digest(), 0
    with _File(path, os.O_RDONLY, buffer) as file:

        def read_piece(piece: Bytes, at: int) -> int:
            return file.read(piece, start + at)

        for piece, count in _transferred(buffer, PIECE // 2, _READS_AT_ONCE, read_piece, _take_memory):
            digest.update(piece[:count])
            total += count
            if count < len(piece):
                break
    return ReadBytes(total, digest.hex())


class _File:
    """An open file, and the same file open past the page cache as long as that works.

    Attributes:
        plain: descriptor that uses the page cache.
    """

    def __init__(self, path: Path, flags: int, buffer: Bytes) -> None:
        self._stack = ExitStack()
        self.plain = self._open(path, flags)
        self._direct: int | None = None
        if len(buffer) >= PAGE and buffer.ctypes.data % PAGE == 0:
            try:
                self._direct = self._open(path, flags & ~os.O_CREAT | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    self._stack.close()
                    raise

    def _open(self, path: Path, flags: int) -> int:
        return self._stack.enter_context(opened(path, flags))

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, piece: Bytes, start: int) -> int:
        """Write a whole piece."""
        return self._all(piece, start, self._write_some)

    def read(self, piece: Bytes, start: int) -> int:
        """Fill a piece; less only at the end of the file."""
        return self._all(piece, start, self._read_some)

    def forget(self, start: int, count: int) -> None:
        """Have the page cache write a part of the file, and forget what is written."""
        os.posix_fadvise(self.plain, start, count, os.POSIX_FADV_DONTNEED)

    def _all(self, piece: Bytes, start: int, transfer: Transfer) -> int:
        done = 0
        while done < len(piece):
            count = transfer(piece[done:], start + done)
            if count == 0:
                break
            done += count
        return done

    def _write_some(self, piece: Bytes, start: int) -> int:
        count = self._past_the_cache(piece, start, lambda *args: os.pwrite(args[0], args[1], args[2]))
        if count is None:
            count = os.pwrite(self.plain, piece.data, start)
            self.forget(start, count)
        return count

    def _read_some(self, piece: Bytes, start: int) -> int:
        count = self._past_the_cache(piece, start, lambda *args: os.preadv(args[0], [args[1]], args[2]))
        return os.preadv(self.plain, [piece.data], start) if count is None else count

    def _past_the_cache(
        self, piece: Bytes, start: int, transfer: Callable[[int, memoryview, int], int]
    ) -> int | None:
        """Transfer as many whole pages of a piece as can go past the page cache; None if that can't be."""
        whole = len(piece) // PAGE * PAGE
        if self._direct is None or whole == 0 or start % PAGE:
            return None
        try:
            return transfer(self._direct, piece[:whole].data, start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = None  # a file system that says no only when it comes to it
            return None


@contextmanager
def _giving_back(file: int) -> Iterator[None]:
    """Return when the disk is full: give back what a file has taken of it, which may be all that was left."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            with suppress(OSError):
                os.ftruncate(file, 0)
        raise


def _reserve(file: int, nbytes: int) -> None:
    """Give a file its size and, where the file system can, its place on the disk.

    No piece then has to wait for the one before it, and a disk that is too full says so before the first.
    """
    if os.fstat(file).st_size == nbytes:
        return
    os.ftruncate(file, 0)
    # Not `os.posix_fallocate`: where the file system can't, glibc writes into each block instead.
    while _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        error = ctypes.get_errno()
        if error in _CANT_RESERVE:
            os.ftruncate(file, nbytes)
            return
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))


def _take_memory(piece: Bytes) -> None:
    """Have the system find the memory of a piece, so that the disk does not wait for that."""
    piece[::HUGE_PAGE] = 0


def _transferred(
    buffer: Bytes,
    size: int,
    at_once: int,
    transfer: Transfer,
    prepare: Callable[[Bytes], None] = lambda piece: None,
) -> Iterator[tuple[Bytes, int]]:
    """As `transferred`, but without a thread for a single piece, as most files are."""
    if len(buffer) <= size:
        yield buffer, transfer(buffer, 0)
        return
    yield from transferred(buffer, size, at_once, transfer, prepare)
