"""Host memory for commits: files exactly as they will lie on disk, fast copies and comparisons, digests."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hvdrecover.checkpoint.layout import Layout

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 1 << 21  # bytes

# Of Linux 4.14, and not in Python's `mmap`.
_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19


def allocate(nbytes: int, *, in_children: bool = False) -> Bytes:
    """Return page-aligned zeroed memory, a uint8 array of shape ``[nbytes]``.

    In child processes it is zero, unless ``in_children``: a data loader's forked workers would keep a copy of
    each page of an arena that the next commit changes. With MADV_DONTFORK, a child that drops the array
    would unmap other memory that lies there in the child.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not in_children:
        memory.madvise(_MADV_WIPEONFORK)
    if nbytes >= HUGE_PAGE:
        # A first commit would otherwise spend most of its time in page faults.
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


class Arena:
    """The bytes of one safetensors file in page-aligned memory.

    Attributes:
        buffer: the whole file, header included; a uint8 array of shape ``[layout.nbytes]``.
        shared: whether the memory is a file of the near tier.
    """

    def __init__(self, layout: Layout, buffer: Bytes | None = None, *, shared: bool = False) -> None:
        self.layout = layout
        self.shared = shared
        self.buffer = allocate(layout.nbytes) if buffer is None else buffer
        if buffer is None:
            self.take_back()

    def bytes_of(self, name: str) -> Bytes:
        start = self.layout.offsets[name]
        return self.buffer[start : start + self.layout.by_name[name].nbytes]

    def offer_back(self) -> None:
        """Let the kernel reclaim the memory if it runs short; until `take_back`, the content is undefined.

        Pages that it does not reclaim are filled again without page faults, which cost more than the filling.
        """
        if (mapping := _mapping(self.buffer)) is not None:
            with contextlib.suppress(OSError):  # an old kernel: the memory stays ours
                mapping.madvise(mmap.MADV_FREE)

    def take_back(self) -> None:
        """Write the header, after `offer_back` as well; the tensors' content is still undefined."""
        self.buffer[: len(self.layout.header)] = np.frombuffer(self.layout.header, dtype=np.uint8)

    def show_to_children(self) -> None:
        if (mapping := _mapping(self.buffer)) is not None:
            mapping.madvise(_MADV_KEEPONFORK)


def _mapping(buffer: Bytes) -> mmap.mmap | None:
    """The mapping that `allocate` made for a buffer."""
    base: object = buffer
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap) else None


# -- copies and comparisons at the speed of the memory -----------------------------------------------

Span = tuple[int, int, int]
"""Addresses of a target and a source that don't overlap, and the number of bytes."""

WORTH_A_SPAN = 1 << 16
"""Bytes of a tensor from which on it is copied or compared by address; below, finding that takes longer."""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_WORTH_A_THREAD = 1 << 25  # bytes
_PIECE = 1 << 22  # bytes; a multiple of a cache line, as pieces must not share one


def _memmove(spans: bytes) -> None:
    """Copy as `_memcpy.copy` does, at two thirds of its speed."""
    for target, source, nbytes in np.frombuffer(spans, dtype=np.uint64).reshape(-1, 3).tolist():
        ctypes.memmove(target, source, nbytes)


try:
    from hvdrecover.checkpoint._memcpy import copy as _copy
except ImportError:  # the package was installed without a C compiler
    _copy = _memmove


def copy_spans(spans: Sequence[Span]) -> None:
    """Copy spans of memory; done on return."""
    if sum(nbytes for _, _, nbytes in spans) < _WORTH_A_THREAD:
        _copy(_packed(spans))
        return
    left = deque(pieces(spans))

    def copy_what_is_left() -> None:
        with contextlib.suppress(IndexError):
            while True:
                _copy(left.popleft())

    # On two threads, as one core cannot use all of the memory's bandwidth. Each takes piece after piece:
    # neither waits long for the other, even if that is kept from its core.
    with ThreadPoolExecutor(1, "hvdrecover-copy") as pool:
        other = pool.submit(copy_what_is_left)
        copy_what_is_left()
        other.result()


def spans_equal(spans: Sequence[Span]) -> bool:
    """Compare spans of memory, bit for bit, up to the first difference."""
    return not any(_libc.memcmp(*span) for span in spans)


def pieces(spans: Sequence[Span]) -> Iterator[bytes]:
    """Return the spans cut into pieces of about equal size, each packed for the copy."""
    piece: list[Span] = []
    room = _PIECE
    for target, source, nbytes in spans:
        done = 0
        while done < nbytes:
            count = min(room, nbytes - done)
            piece.append((target + done, source + done, count))
            done, room = done + count, room - count
            if not room:
                yield _packed(piece)
                piece, room = [], _PIECE
    if piece:
        yield _packed(piece)


def _packed(spans: Sequence[Span]) -> bytes:
    return np.array(spans, dtype=np.uint64).tobytes()


# -- digests -----------------------------------------------------------------------------------------
# xxh3-128 finds damage. It does not protect against somebody who can write to the root.


def digest(data: Any) -> str:
    """Return the digest of bytes or of a buffer, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_numbers(*data: Any) -> tuple[int, int]:
    """Return one digest of all buffers as two signed numbers of 64 bits, as collectives carry them."""
    whole = xxhash.xxh3_128()
    for each in data:
        whole.update(each)
    high, low = np.frombuffer(whole.digest(), dtype=">i8").tolist()
    return high, low
