"""Files of shared memory, mapped in huge pages.

A tmpfs has small pages, unless root has mounted it otherwise. To look up those of a gigabyte takes a core
0.1 to 0.3 s. So does letting go of them: a process that is killed is not gone before, and nobody knows. But a
process may ask for huge pages by itself (``MADV_COLLAPSE``), and gets them as far as Linux has any.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np

from hvdrecover.checkpoint.arena import HUGE_PAGE, Bytes
from hvdrecover.checkpoint.storage.pieces import transferred

_PIECE = 1 << 24  # bytes of which the pages are looked up at a time
_AT_ONCE = 2
_MADV_POPULATE_READ = 22  # since Linux 5.14
_MADV_COLLAPSE = 25  # since Linux 6.1
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def mapped(file: int, nbytes: int, flags: int = mmap.MAP_SHARED) -> Bytes:
    """Map a file where its huge pages can be mapped as such; forked processes don't have the memory.

    Args:
        file: a descriptor, open for what the mapping is to do.
        nbytes: the file's size.
        flags: ``MAP_SHARED``; or ``MAP_PRIVATE``, with which nothing that is written gets into the file.

    Raises:
        OSError: it can't be mapped.
    """
    # The file takes the place of the middle of a mapping that is larger; it goes when that does.
    whole = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(whole, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = memory.ctypes.data + start
    if _libc.mmap(address, nbytes, access, flags | _MAP_FIXED, file, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    whole.madvise(mmap.MADV_DONTFORK)
    return memory[start : start + nbytes]


def allocated(file: int, nbytes: int) -> Bytes:
    """Map a new file with all of its memory, so that no page of it is missing when it is written to.

    Raises:
        OSError: there is no room for it.
    """
    os.truncate(file, nbytes)
    memory = mapped(file, nbytes)
    for start in range(0, nbytes // HUGE_PAGE * HUGE_PAGE, HUGE_PAGE):
        os.posix_fallocate(file, start, 1)  # a huge page is made of small ones that are there: of one will do
        if _libc.madvise(memory.ctypes.data + start, HUGE_PAGE, _MADV_COLLAPSE):
            break  # an older Linux, no tmpfs, or no huge page is left
    # The rest of it now: a page that can't be had later is not an error that Python sees, but SIGBUS.
    os.posix_fallocate(file, 0, nbytes)
    return memory


def resident(memory: Bytes) -> Iterator[Bytes]:
    """Give a mapped file piece by piece, each when its pages are mapped, while those of the next ones are."""
    for piece, _ in transferred(memory, _PIECE, _AT_ONCE, lambda piece, start: _look_up(piece)):
        yield piece


def _look_up(memory: Bytes) -> None:
    # Not MAP_POPULATE: Python maps without letting other threads run. An older kernel looks up later.
    _libc.madvise(memory.ctypes.data, len(memory), _MADV_POPULATE_READ)
