"""Files of shared memory, mapped in huge pages.

A tmpfs has small pages, unless root has mounted it otherwise. To look up those of a gigabyte takes a core
0.1 to 0.3 s. So does letting go of them: a process that is killed is not gone before, and nobody knows. But a
process may ask for huge pages by itself (``MADV_COLLAPSE``), and gets them as far as Linux has any.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from hvdrecover.checkpoint.arena import HUGE_PAGE, Bytes
from hvdrecover.checkpoint.storage.pieces import transferred

_PIECE = 1 << 24  # bytes of which the pages are looked up at a time
_AT_ONCE = 2
_COLLAPSED = (
    1 << 27
)  # bytes that become huge pages at a time; for each, all processors are asked for what they hold
_RESERVED = 0  # PROT_NONE: addresses alone, which count for no limit of memory
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22  # since Linux 5.14
_MADV_COLLAPSE = 25  # since Linux 6.1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def mapped(file: int, nbytes: int, flags: int = mmap.MAP_SHARED) -> Bytes:
    """Map a file where its huge pages can be mapped as such; forked processes don't have the memory.

    Args:
        file: a descriptor, open for what the mapping is to do.
        nbytes: the file's size.
        flags: ``MAP_SHARED``; or ``MAP_PRIVATE``, with which nothing that is written gets into the file.

    Returns:
        A uint8 array of shape ``[nbytes]``; the mapping ends with the last array or tensor of its memory.

    Raises:
        OSError: it can't be mapped, or is shorter.
    """
    if os.fstat(file).st_size < nbytes:
        raise OSError(errno.EIO, "the file is shorter than its layout")  # to read it would end in SIGBUS
    size = nbytes + HUGE_PAGE
    place = _map(None, size, _RESERVED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-place // HUGE_PAGE) * HUGE_PAGE
    # If this fails, Linux may have given the addresses to another thread already: they must not be unmapped.
    _map(start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, file)
    _libc.madvise(place, size, mmap.MADV_DONTFORK)
    owner = (ctypes.c_uint8 * nbytes).from_address(start)
    weakref.finalize(owner, _unmap, place, size, os.getpid()).atexit = False
    return np.frombuffer(memoryview(owner), dtype=np.uint8)


def allocated(file: int, nbytes: int) -> Bytes:
    """Map a new file with all of its memory, so that no page of it is missing when it is written to.

    Raises:
        OSError: there is no room for it.
    """
    os.truncate(file, nbytes)
    memory = mapped(file, nbytes)
    huge = nbytes // HUGE_PAGE * HUGE_PAGE
    bounds = [0, *range(HUGE_PAGE, huge, _COLLAPSED), huge]  # the first huge page shows whether there are any
    for first, last in pairwise(bounds):
        for number in range(first // HUGE_PAGE, last // HUGE_PAGE):
            # A huge page is made of what there is of it, and one small page will do. It comes from the same
            # node's memory as that one: not the first each time, or interleaved files would lie on one node.
            page = number * mmap.PAGESIZE % HUGE_PAGE
            os.posix_fallocate(file, number * HUGE_PAGE + page, 1)
        if not _collapse(memory[first:last]):
            break
    # The rest of it now: a page that can't be had later is not an error that Python sees, but SIGBUS.
    os.posix_fallocate(file, 0, nbytes)
    return memory


def resident(memory: Bytes) -> Iterator[Bytes]:
    """Give a mapped file piece by piece, each when its pages are mapped, while those of the next ones are."""
    for piece, _ in transferred(memory, _PIECE, _AT_ONCE, lambda piece, start: _look_up(piece)):
        yield piece


def _map(address: int | None, nbytes: int, access: int, flags: int, file: int) -> int:
    place: int = _libc.mmap(address, nbytes, access, flags, file, 0)
    if place == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return place


def _unmap(place: int, size: int, owner: int) -> None:
    if os.getpid() == owner:  # a child has something else there
        _libc.munmap(place, size)


def _collapse(memory: Bytes) -> bool:
    """Ask for huge pages; return False if there are none to be had.

    That is so if Linux is older than 6.1, if it has none left, or if the file is not on a tmpfs.
    """
    for _ in range(2):
        if _libc.madvise(memory.ctypes.data, len(memory), _MADV_COLLAPSE) == 0:
            return True
        if ctypes.get_errno() != errno.EAGAIN:
            return False
    return True  # but for pages that were in use for a moment


def _look_up(memory: Bytes) -> None:
    # Not MAP_POPULATE: Python maps without letting other threads run. An older kernel looks up later.
    _libc.madvise(memory.ctypes.data, len(memory), _MADV_POPULATE_READ)
