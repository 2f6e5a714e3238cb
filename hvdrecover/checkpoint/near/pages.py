"""Files of the near tier, mapped into this process in huge pages where Linux has some.

A tmpfs has pages of 4 KB unless root mounted it otherwise. To map a gigabyte of them takes a core 0.1 to
0.3 s. So does unmapping: a killed process is not gone before that ends, so its death is noticed late. A
process can ask for huge pages itself (``MADV_COLLAPSE``, Linux 6.1).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from hvdrecover.checkpoint.arena import HUGE_PAGE, Bytes

_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def create(path: Path, nbytes: int) -> Bytes:
    """Create a file and map it, with all of its memory.

    Raises:
        OSError: the file system or the memory is full.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(file, nbytes)
        memory = _mapped(file, nbytes)
        # A huge page is made from the small pages that exist. One is enough, and costs least.
        for start in range(0, nbytes - HUGE_PAGE + 1, HUGE_PAGE):
            os.posix_fallocate(file, start, 1)
        _libc.madvise(memory.ctypes.data, nbytes // HUGE_PAGE * HUGE_PAGE, _MADV_COLLAPSE)
        # Reserve the rest now: a page that is missing later is not an error that Python sees, but SIGBUS.
        os.posix_fallocate(file, 0, nbytes)
        _libc.madvise(memory.ctypes.data, nbytes, _MADV_POPULATE_WRITE)
    finally:
        os.close(file)
    return memory


def open_existing(path: Path, nbytes: int) -> Bytes:
    """Map a file that another process made.

    Raises:
        OSError: it cannot be mapped, or is shorter.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        if status.st_size < nbytes:
            raise OSError(errno.EIO, "the file is shorter than its layout")  # a read would end in SIGBUS
        if status.st_blocks * 512 < nbytes:
            os.posix_fallocate(file, 0, nbytes)
        return _mapped(file, nbytes)
    finally:
        os.close(file)


def _mapped(file: int, nbytes: int) -> Bytes:
    """Map a file at an address where its huge pages can be mapped as such; forked processes do not get it."""
    size = nbytes + HUGE_PAGE
    place = _map(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)  # addresses only, without memory
    start = -(-place // HUGE_PAGE) * HUGE_PAGE
    # If this fails, Linux may have given the addresses to another thread already: they must not be unmapped.
    _map(start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file)
    _libc.madvise(place, size, mmap.MADV_DONTFORK)
    owner = (ctypes.c_uint8 * nbytes).from_address(start)
    weakref.finalize(owner, _unmap, place, size, os.getpid()).atexit = False
    return np.frombuffer(memoryview(owner), dtype=np.uint8)


def _map(address: int | None, nbytes: int, access: int, flags: int, file: int) -> int:
    place: int = _libc.mmap(address, nbytes, access, flags, file, 0)
    if place == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return place


def _unmap(place: int, size: int, owner: int) -> None:
    if os.getpid() == owner:  # a child has something else there
        _libc.munmap(place, size)
