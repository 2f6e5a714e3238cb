"""Descriptors that no forked child keeps.

A data loader forks the training process, perhaps while the writer has files open. A fork without exec
inherits all descriptors, whatever ``O_CLOEXEC`` says, and as long as one is open, a deleted file keeps its
blocks. So each child closes those that are opened here, before anything else runs in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_DELETED = " (deleted)"  # what the kernel adds to the path of a file that is gone


@dataclass(eq=False)
class _Opened:
    """A file that is open, or is being opened or closed: then its descriptor is not certain."""

    path: str
    descriptor: int | None = None


_opened: set[_Opened] = set()


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, as long as the block lasts.

    Args:
        path: the file.
        flags: as for `os.open`; the descriptor is also closed by an exec.
    """
    entry = _Opened(str(path.parent.resolve() / path.name))
    _opened.add(entry)
    try:
        descriptor = entry.descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
        finally:
            entry.descriptor = None  # from now on, the number may be another file's
            os.close(descriptor)
    finally:
        _opened.discard(entry)


def _close_in_child() -> None:
    entries = list(_opened)
    _opened.clear()
    for entry in entries:
        if entry.descriptor is not None:
            with suppress(OSError):
                os.close(entry.descriptor)
    uncertain = {entry.path for entry in entries if entry.descriptor is None}
    if uncertain:
        _close_files(uncertain)


def _close_files(paths: set[str]) -> None:
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if str(link.readlink()).removesuffix(_DELETED) in paths:
                os.close(int(link.name))


os.register_at_fork(after_in_child=_close_in_child)
