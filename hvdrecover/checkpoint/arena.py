"""Host memory that holds a file exactly as it will lie on disk."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.layout import Layout

Bytes = npt.NDArray[np.uint8]


HUGE_PAGE = 1 << 21  # bytes


def allocate(nbytes: int, *, in_children: bool = False) -> Bytes:
    """Return page-aligned zeroed memory, a uint8 array of shape ``[nbytes]``.

    Child processes do not have it, unless ``in_children``: a data loader's forked workers would keep a copy
    of each page of an arena that the next commit changes.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not in_children:
        memory.madvise(mmap.MADV_DONTFORK)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
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
            self._write_header()

    def bytes_of(self, name: str) -> Bytes:
        start = self.layout.offsets[name]
        return self.buffer[start : start + self.layout.by_name[name].nbytes]

    def offer_back(self) -> None:
        """Let the kernel reclaim the memory if it runs short; until `take_back`, the content is undefined.

        Pages that it does not reclaim are filled again without page faults, which cost more than the filling.
        """
        mapping = _mapping(self.buffer)
        if mapping is not None and hasattr(mmap, "MADV_FREE"):
            with contextlib.suppress(OSError):  # a kernel that can't; then it stays ours
                mapping.madvise(mmap.MADV_FREE)

    def take_back(self) -> None:
        """Make the arena usable again after `offer_back`; the tensors' content is still undefined."""
        self._write_header()

    def show_to_children(self) -> None:
        if (mapping := _mapping(self.buffer)) is not None:
            mapping.madvise(mmap.MADV_DOFORK)

    def _write_header(self) -> None:
        self.buffer[: len(self.layout.header)] = np.frombuffer(self.layout.header, dtype=np.uint8)


def _mapping(buffer: Bytes) -> mmap.mmap | None:
    """The mapping that `allocate` made for a buffer."""
    base: object = buffer
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap) else None
