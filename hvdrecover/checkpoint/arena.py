"""One safetensors file in memory as on disk, with fast copies, comparisons and digests of its bytes.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
MAX_HEADER = 100_000_000  # the limit that safetensors' own reader sets
_MAX_DIMENSIONS = 64  # numpy's and torch's limit

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
HUGE_PAGE = 1 << 21  # bytes
_libc = ctypes.CDLL(None, use_errno=True)

# Of Linux 4.14, and not in Python's `mmap`.
_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19


# -- the format ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (a key of `ITEM_BYTES`) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """The place of each tensor in a file: the tensors in the order of their bytes, after the header."""

    specs: tuple[TensorSpec, ...]
    header: bytes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Each tensor's first byte, counted from the start of the file."""
        offsets, position = {}, len(self.header)
        for spec in self.specs:
            offsets[spec.name] = position
            position += spec.nbytes
        return offsets

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + sum(spec.nbytes for spec in self.specs)


def plan(specs: Sequence[TensorSpec]) -> Layout:
    """Lay tensors out: widest dtypes first, so that each is aligned; otherwise in the given order."""
    if len({"__metadata__", *(spec.name for spec in specs)}) != len(specs) + 1:
        raise ValueError("tensors need names of their own, other than '__metadata__'")
    ordered = tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))
    entries: dict[str, Any] = {}
    position = 0
    for spec in ordered:
        end = position + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces, which the format allows, make the bytes of the tensors begin on a page: the file can then be
    # handed to the disk as it lies in memory.
    padded = text + b" " * (-(8 + len(text)) % PAGE)
    if len(padded) > MAX_HEADER:
        raise ValueError(f"the names of {len(specs)} tensors take more than {MAX_HEADER} bytes")
    return Layout(ordered, len(padded).to_bytes(8, "little") + padded)


def header_size(prefix: bytes, file_size: int) -> int:
    """Return the number of bytes before the tensors, from a file's first 8 bytes."""
    length = int.from_bytes(prefix[:8], "little")
    if file_size < 8 or length > MAX_HEADER or 8 + length > file_size:
        raise ValueError(f"it has no safetensors header: {length} bytes of header in a file of {file_size}")
    return 8 + length


def parse(header: bytes, file_size: int) -> Layout:
    """Read a header, the file's bytes up to the first tensor; its tensors must fill the rest exactly."""
    try:
        entries = json.loads(header[8:].decode())  # or it would guess at other encodings
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    entries.pop("__metadata__", None)
    found = [_entry(name, entry) for name, entry in entries.items()]
    found.sort(key=lambda item: (item[1], item[2]))
    position = 0
    for spec, start, end in found:
        if start != position or end - start != spec.nbytes:
            raise ValueError(f"tensor '{spec.name}' does not lie where the one before it ends")
        if (len(header) + start) % ITEM_BYTES[spec.dtype]:
            raise ValueError(f"tensor '{spec.name}' is not aligned, so no array can be made of its bytes")
        position = end
    if len(header) + position != file_size:
        raise ValueError(f"the tensors end at byte {len(header) + position} of {file_size}")
    return Layout(tuple(spec for spec, _, _ in found), header)


def _entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """Return a tensor of a header, its first byte and its end, both counted from the header's end."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor '{name}' is not a JSON object")
    facts: list[Any] = [entry.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = facts
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor '{name}' has the unknown dtype {dtype!r}")
    for counts in (shape, offsets):
        if not isinstance(counts, list) or not all(
            type(each) is int and 0 <= each < 2**63 for each in counts
        ):
            raise ValueError(f"tensor '{name}' has a shape or offsets that are not lists of counts")
    if len(shape) > _MAX_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"tensor '{name}' has too many dimensions, or not two offsets")
    return TensorSpec(name, dtype, tuple(shape)), *offsets


# -- memory --------------------------------------------------------------------------------------------


def allocate(nbytes: int, *, in_children: bool = False) -> Bytes:
    """Return page-aligned zeroed memory, a uint8 array of shape ``[nbytes]``."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not in_children:
        # Child processes get zeros: a data loader's forked workers would keep a copy of each page of an arena
        # that the next commit changes. With MADV_DONTFORK, a child that drops the array would unmap other
        # memory that lies there in the child.
        memory.madvise(_MADV_WIPEONFORK)
    if nbytes >= HUGE_PAGE:
        # A first commit would otherwise spend most of its time in page faults.
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


class Arena:
    """The bytes of one safetensors file in page-aligned memory."""

    def __init__(self, layout: Layout, buffer: Bytes | None = None, *, shared: bool = False) -> None:
        self.layout = layout
        self.shared = shared  # the memory is a file of the near tier
        self.buffer = allocate(layout.nbytes) if buffer is None else buffer  # with the header
        if buffer is None:
            self.take_back()

    @classmethod
    def of_file(cls, buffer: Bytes) -> Arena:
        """Return a file that was read whole; raise ValueError if it is not a safetensors file."""
        nbytes = len(buffer)
        return cls(parse(buffer[: header_size(buffer[:8].tobytes(), nbytes)].tobytes(), nbytes), buffer)

    def bytes_of(self, name: str) -> Bytes:
        start = self.layout.offsets[name]
        return self.buffer[start : start + self.layout.by_name[name].nbytes]

    def offer_back(self) -> None:
        """Let the kernel reclaim the memory if it runs short; until `take_back`, the content is undefined."""
        if (mapping := _mapping(self.buffer)) is not None:
            with contextlib.suppress(OSError):  # an old kernel: the memory stays ours
                # Pages left to us are filled again without page faults, which cost more than the filling.
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


# -- files in huge pages -------------------------------------------------------------------------------
# A tmpfs has pages of 4 KB unless root mounted it otherwise. To map a gigabyte of them takes a core 0.1 to
# 0.3 s. So does unmapping: a killed process is not gone before that ends, so its death is noticed late. A
# process can ask for huge pages itself (MADV_COLLAPSE, Linux 6.1).

_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def map_file(path: Path, nbytes: int) -> Bytes:
    """Map a file with all of its memory; make it if it is missing or of another size."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        is_new = os.fstat(file).st_size != nbytes
        os.truncate(file, nbytes)
        memory = _map(file, nbytes)
        if is_new:
            # A huge page is made from the small pages that exist. One is enough, and costs least.
            for start in range(0, nbytes - HUGE_PAGE + 1, HUGE_PAGE):
                os.posix_fallocate(file, start, 1)
            _libc.madvise(memory.ctypes.data, nbytes // HUGE_PAGE * HUGE_PAGE, _MADV_COLLAPSE)
        # Reserve the rest now: a page that is missing later is not an error that Python sees, but SIGBUS.
        if os.fstat(file).st_blocks * 512 < nbytes:
            os.posix_fallocate(file, 0, nbytes)
        if is_new:
            _libc.madvise(memory.ctypes.data, nbytes, _MADV_POPULATE_WRITE)
        return memory
    finally:
        os.close(file)


def _map(file: int, nbytes: int) -> Bytes:
    """Map a file at an address where its huge pages can be mapped as such; forked processes do not get it."""
    size = nbytes + HUGE_PAGE
    place = _mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)  # addresses only, without memory
    start = -(-place // HUGE_PAGE) * HUGE_PAGE
    # If this fails, Linux may have given the addresses to another thread already: they must not be unmapped.
    _mmap(start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file)
    _libc.madvise(place, size, mmap.MADV_DONTFORK)
    owner = (ctypes.c_uint8 * nbytes).from_address(start)
    weakref.finalize(owner, _unmap, place, size, os.getpid()).atexit = False
    return np.frombuffer(memoryview(owner), dtype=np.uint8)


def _mmap(address: int | None, nbytes: int, access: int, flags: int, file: int) -> int:
    place: int = _libc.mmap(address, nbytes, access, flags, file, 0)
    if place == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return place


def _unmap(place: int, size: int, owner: int) -> None:
    if os.getpid() == owner:  # a child has something else there
        _libc.munmap(place, size)


# -- copies and comparisons at the speed of the memory -----------------------------------------------

Span = tuple[int, int, int]
"""Addresses of a target and a source that don't overlap, and the number of bytes."""

WORTH_A_SPAN = 1 << 16
"""Bytes of a tensor from which on it is copied or compared by address; below, finding that takes longer."""

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


digest: Callable[[Any], str] = xxhash.xxh3_128_hexdigest  # of bytes or of a buffer


def digest_numbers(*data: Any) -> tuple[int, int]:
    """Return one digest of all buffers as two signed numbers of 64 bits, as collectives carry them."""
    whole = xxhash.xxh3_128()
    for each in data:
        whole.update(each)
    high, low = np.frombuffer(whole.digest(), dtype=">i8").tolist()
    return high, low
