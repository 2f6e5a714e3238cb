"""Heartbeats: a page of memory that a training process writes and its guardian reads.

The page holds 64-bit numbers, written one at a time by one process, so no lock is needed. Without a guardian,
the process writes to private memory instead.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

SIZE = mmap.PAGESIZE
_PATIENCE = 2.0  # seconds for the guardian to look at the page


class Phase(IntEnum):
    """The phase of a training process."""

    UNKNOWN = 0  # it has not imported an adapter
    READY = 1  # a standby that waits
    STARTING = 2  # until the ranks have agreed on a state
    BEGINNING = 3  # from there to the next commit: on some ranks, functions are compiled now
    TRAINING = 4
    RECOVERING = 5  # leaves the old ranks, meets the present ones, and agrees on a state
    FINISHED = 6  # its training function has returned, and the finished mark is durable
    LEFT = 7  # it leaves after a preemption, and has nothing left to save
    REMOVED = 8  # the job has removed its host
    PLAIN = 9  # after `hvd.init()`, in code of the script that has called neither `run` nor `resume`


class Stop(IntEnum):
    """The requests of a guardian to its training process, for the next commit."""

    NO = 0
    HOST = 1  # this host leaves
    JOB = 2  # all leave


@dataclass(frozen=True)
class Reading:
    """The contents of a page at one moment."""

    phase: Phase
    silent: float = 0.0  # seconds since the last progress
    longest: float = 0.0  # the longest time without progress, in seconds, of any rank; 0 if none is over
    paused: bool = False  # whether the process is inside `paused`
    waiting: bool = False  # it has left `paused`, without progress since: other ranks may still be inside
    commits: int = 0  # commits of this process
    generation: int = 0  # of its last commit; 0 before the first
    commit: int = 0  # number of its last commit
    steps: int = 0  # steps since then
    rank: int = -1  # -1 if it has none
    stop: Stop = Stop.NO  # the request to stop, by its guardian or a signal
    diverged: int = 0  # how often its parameters were not those of most ranks
    changed: int = 0  # commits of the whole run, up to its last one, at which the state had changed
    agreed: int = 0  # `changed` at the commit that it resumed from
    in_run: bool = False  # it has called a function decorated by `run`, so it survives others' loss

    @property
    def point(self) -> tuple[int, int]:
        """How far the training has come: commits at which the state had changed, and steps since."""
        return self.changed, self.steps


# The numbers that mean the same in a page and in a reading.
_ALIKE = ("longest", "commits", "generation", "commit", "diverged", "changed", "agreed")


class Page(ctypes.Structure):
    """The page: 64-bit numbers. Those that `Reading` has, too, are explained there."""

    stamp: float  # time of the last progress, by the monotonic clock, which all processes of a host share
    longest: float
    phase: int
    pauses: int
    paused: int  # 1 if there was a pause since the last progress
    generation: int
    commit: int
    commits: int
    changed: int
    agreed: int
    stepped: int  # optimizer steps since the last commit
    recorded: int  # batches recorded since the last commit
    rank: int
    stop: int
    stall: int  # seconds for which ranks may wait for one that says nothing, in training; 0 for ever
    stall_beginning: int  # the same in a beginning
    looks: int  # how often the guardian has set these
    diverged: int
    in_run: int

    _fields_ = [
        (name, ctypes.c_double if kind == "float" else ctypes.c_int64)
        for name, kind in __annotations__.items()
    ]

    def read(self) -> Reading:
        return Reading(
            phase=Phase(self.phase),
            silent=max(0.0, time.monotonic() - self.stamp),
            paused=self.pauses > 0,
            waiting=self.paused > 0,
            steps=max(self.stepped, self.recorded),
            rank=self.rank,
            stop=Stop(self.stop),
            in_run=self.in_run > 0,
            **{name: getattr(self, name) for name in _ALIKE},
        )

    def begin(self, phase: Phase) -> None:
        """Note the beginning of a process's life."""
        self.rank, self.phase = -1, phase
        self.touch()

    def touch(self) -> None:
        """Count the time without progress from now on."""
        self.stamp = time.monotonic()

    def ask(self, stop: Stop) -> None:
        """Ask the process to stop at its next commit."""
        self.stop = max(stop, self.stop)

    def has_seen(self, seconds: float) -> None:
        """Note a time without progress, perhaps of another process; see `Reading.longest`."""
        self.longest = max(seconds, self.longest)

    def allow_stalls(self, training: int, beginning: int) -> None:
        """Say how long ranks may wait for one that says nothing, in these phases; 0 for ever."""
        self.stall, self.stall_beginning = training, beginning
        self.looks += 1


_page = Page.from_buffer(bytearray(SIZE))
_notes: int | None = None
_events: int | None = None
_beginning = 0.0  # longest time without progress in the present beginning
_at_progress: list[Callable[[], None]] = []
_at_commit: list[Callable[[], None]] = []


def attach(page: int, notes: int, events: int | None = None) -> None:
    """Use the page and the pipes of the guardian that started this process, by their file descriptors."""
    global _page, _notes, _events
    _page = Page.from_buffer(mmap.mmap(page, SIZE))
    _notes, _events = notes, events
    if _page.phase in (Phase.UNKNOWN, Phase.READY):
        enter(Phase.STARTING)


def watched() -> bool:
    """Return whether a guardian reads this process's page."""
    return _notes is not None


def event_pipe() -> int | None:
    """Return the file descriptor of the pipe that takes events for the guardian."""
    return _events


def heartbeat() -> None:
    """Report progress. Call it in long phases without steps, so that the process does not count as hanging.

    Examples:
        >>> for chunk in range(3):  # of a long evaluation
        ...     recover.heartbeat()
    """
    _progressed()
    if _at_progress:
        _run(_at_progress)


def _progressed() -> None:
    global _beginning
    page, now = _page, time.monotonic()
    gap, page.stamp = now - page.stamp, now
    if page.paused:
        page.paused = 0
    elif page.pauses:
        return
    elif page.phase in (Phase.TRAINING, Phase.PLAIN):
        page.has_seen(gap)
    elif page.phase == Phase.BEGINNING:  # `committed` notes it
        _beginning = max(gap, _beginning)


def stepped() -> None:
    _page.stepped += 1
    heartbeat()


def recorded() -> None:
    _page.recorded += 1
    heartbeat()


def committed(generation: int, commit: int, changed: int) -> None:
    """Note a commit; no step, as a script may commit before its first one. Arguments as of `stand_at`."""
    _progressed()
    stand_at(generation, commit, changed)
    _page.commits += 1
    if _page.phase == Phase.BEGINNING:
        _page.has_seen(_beginning)
    if _page.phase in (Phase.STARTING, Phase.BEGINNING):
        _page.phase = Phase.TRAINING
    if _at_commit:
        _run(_at_commit)


def stand_at(generation: int, commit: int, changed: int) -> None:
    """Note which commit the process is at, after a commit or a recovery; see `Reading`."""
    _page.generation, _page.commit, _page.changed = generation, commit, changed
    _page.stepped = _page.recorded = 0


def commits() -> int:
    return _page.commits


def steps() -> int:
    """Return the number of steps since the last commit."""
    return max(_page.stepped, _page.recorded)


def enter(phase: Phase) -> None:
    _page.phase = phase
    _page.touch()


def initialised(rank: int) -> None:
    """Note that ``hvd.init()`` has returned, so the script's own code runs now."""
    if _page.phase == Phase.STARTING and not _page.in_run:
        _page.rank = rank
        enter(Phase.PLAIN)


def removed() -> None:
    """Note that ``hvd.init()`` has failed because the job has removed this host."""
    enter(Phase.REMOVED)


def training_begins(*, in_run: bool) -> None:
    """Note a call of ``state.resume()``, or of a function decorated by `run`."""
    _page.in_run |= in_run
    if _page.phase == Phase.PLAIN:
        enter(Phase.STARTING)


def lost_ranks(error: str) -> None:
    """Note an error that Horovod raises when ranks are lost: the script may catch it and exit in any way.

    `run` handles such errors by itself.
    """
    if not _page.in_run:
        notify(lost=error)


def resume() -> None:
    """Note that the ranks have agreed on a state, and resume from it."""
    global _beginning
    _beginning = 0.0
    _page.agreed = _page.changed
    enter(Phase.BEGINNING)


def take_rank(rank: int) -> None:
    _page.rank = rank


def longest() -> float:
    """The longest time without progress, in seconds, of any rank."""
    return _page.longest


def has_seen(seconds: float) -> None:
    _page.has_seen(seconds)


def read() -> Reading:
    return _page.read()


def await_guardian() -> None:
    """Wait until the guardian has set the stalls by the present longest time, which it does all the time."""
    enough = _page.looks + 2  # it may be in the middle of a look
    deadline = time.monotonic() + _PATIENCE
    while watched() and _page.looks < enough and time.monotonic() < deadline:
        time.sleep(0.01)


def diverged() -> None:
    _page.diverged += 1


def stop_asked() -> Stop:
    return Stop(_page.stop)


def ask_to_stop(stop: Stop) -> None:
    _page.ask(stop)


def stall_seconds() -> int:
    """Return for how many seconds this rank waits for a silent one; 0: no limit, as inside `paused`."""
    phase = _page.phase
    if _page.pauses or _page.paused or phase not in (Phase.TRAINING, Phase.BEGINNING):
        return 0
    return _page.stall if phase == Phase.TRAINING else _page.stall_beginning


@contextmanager
def paused() -> Iterator[None]:
    """Allow the code inside to take any time without progress, on all ranks.

    All ranks must enter it, even ranks without work there: they wait for the others afterwards.
    """
    _page.pauses += 1
    _page.touch()
    try:
        yield
    finally:
        _page.touch()
        _page.paused = 1
        _page.pauses -= 1


def at_progress(callback: Callable[[], None]) -> None:
    """Register a function to be called once, at the next step or heartbeat."""
    _at_progress.append(callback)


def at_commit(callback: Callable[[], None]) -> None:
    """Register a function to be called once, at the next commit."""
    _at_commit.append(callback)


def _run(callbacks: list[Callable[[], None]]) -> None:
    called = callbacks.copy()
    del callbacks[: len(called)]
    for callback in called:
        callback()


def notify(**facts: Any) -> None:
    """Send the guardian a note, a line of JSON."""
    if _notes is not None:
        os.write(_notes, f"{json.dumps(facts)}\n".encode())


def notes_since(descriptor: int, start: int) -> dict[str, Any]:
    """Return the notes of a training process from byte ``start`` on; of each fact, the last value."""
    notes: dict[str, Any] = {}
    size = os.fstat(descriptor).st_size
    for line in os.pread(descriptor, size - start, start).splitlines():
        try:
            notes.update(json.loads(line))
        except ValueError:  # the process was killed while it wrote the line
            continue
    return notes


def stalled_since(descriptor: int, start: int) -> dict[int, list[str]]:
    """Return the tensors that wait for each rank, as Horovod has noted last from this byte on.

    Horovod notes them on rank 0 only, and whenever it ends a stall.
    """
    return {int(rank): names for rank, names in notes_since(descriptor, start).get("stalled", {}).items()}
