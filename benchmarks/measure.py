"""Taking measures by turns, and the things that would spoil them."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.state.state import State

Take = Callable[[], float]
"""Prepares, measures once, and cleans up; only the measured part is in what it returns."""

GB = 1e9
_PAGE = 4096
_CLEANUP_SECONDS = 60.0


def stopwatch(action: Callable[[], object]) -> float:
    """Return how long an action takes, in seconds."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def by_turns(rounds: int, takes: Sequence[Callable[[], Any]], warmups: int = 1) -> list[list[Any]]:
    """Take measures in the order A B C A B C …, so that a machine that gets slower does so for all.

    Returns:
        For each take, its values.
    """
    values: list[list[Any]] = [[] for _ in takes]
    gc.collect()
    gc.freeze()  # else each collection looks at a million objects of the libraries
    for number in range(warmups + rounds):
        for take, mine in zip(takes, values, strict=True):
            gc.collect()
            value = take()
            if number >= warmups:
                mine.append(value)
    return values


class Reserve:
    """Memory that is there when a measured action needs it.

    Virtual machines give memory that is free for some seconds back to their host, and to get it again costs
    seconds per gigabyte. Whoever allocates next would pay that, be it us or a peer. So some is held between
    measures, and freed right before each.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: Bytes | None = None
        self._take()

    @contextmanager
    def freed(self) -> Iterator[None]:
        """Within this, others can have the memory."""
        self._memory = None
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._memory = allocate(self._nbytes)
        self._memory[::_PAGE] = 1


def forget_cached(folder: Path) -> None:
    """Have the page cache forget all files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # only clean pages can be forgotten
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def sync_all(path: Path) -> None:
    """Fsync a file, or a folder and all in it."""
    for each in [path, *path.rglob("*"), path.parent]:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def let_clean_up(state: State) -> None:
    """Wait until what is no longer kept is gone: deleting must not slow down what is measured next."""
    assert state._session.durable._writer is not None
    if not state._session.durable._writer.wait_for_cleanup(_CLEANUP_SECONDS):
        raise RuntimeError("old commits are being deleted still")


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended, user and system."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def resident() -> int:
    """Memory of this process in bytes, without what the system may take whenever it needs some."""
    path = "/proc/self/smaps_rollup"
    return _field(path, "Rss") - _field(path, "LazyFree")


def proportional(process: int) -> int:
    """Memory of a process in bytes; of what it shares with others, its part (PSS)."""
    return _field(f"/proc/{process}/smaps_rollup", "Pss")


def cpu_time(process: int) -> float:
    """Processor time that the threads of a process have used, in seconds, to the nanosecond."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


class PeakMemory:
    """The most memory that this process has used since this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; see proc_pid_clear_refs(5)

    def nbytes(self) -> int:
        """The peak up to now, in bytes."""
        return _field("/proc/self/status", "VmHWM")


def _field(path: str, field: str) -> int:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise LookupError(field)
