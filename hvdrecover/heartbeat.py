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
_PATIENCE = 2.0  # seconds for the guardian to read the page


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


_TRAINING, _BEGINNING, _PLAIN = Phase.TRAINING, Phase.BEGINNING, Phase.PLAIN


@dataclass(frozen=True)
class Reading:
    """The contents of a page.

    Attributes:
        phase: the phase of the process.
        silent: seconds since its last progress.
        longest: the longest time without progress in training, in seconds, of any rank.
        longest_beginning: the same for beginnings that are over; 0 if none is.
        paused: whether it is inside `paused`.
        waiting: whether it has left `paused`, without progress since: other ranks may still be inside.
        commits: how many commits this process has made.
        generation: of its last commit; 0 before the first.
        commit: number of its last commit.
        steps: steps since then.
        rank: its rank, or -1.
        stop: the request to stop, by its guardian or a signal.
        diverged: how often its parameters were not those of most ranks.
        changed: commits of the whole run, up to its last one, at which the state had changed.
        agreed: `changed` at the commit that it resumed from.
        in_run: whether it has called a function decorated by `run`, so it survives the loss of other ranks.
    """

    phase: Phase
    silent: float = 0.0
    longest: float = 0.0
    longest_beginning: float = 0.0
    paused: bool = False
    waiting: bool = False
    commits: int = 0
    generation: int = 0
    commit: int = 0
    steps: int = 0
    rank: int = -1
    stop: Stop = Stop.NO
    diverged: int = 0
    changed: int = 0
    agreed: int = 0
    in_run: bool = False

    @property
    def point(self) -> tuple[int, int]:
        """Return how far the training has come: commits at which the state had changed, and steps since."""
        return self.changed, self.steps


class Page(ctypes.Structure):
    """The page. Each field is a 64-bit number; fields count something unless they are seconds."""

    stamp: float  # time of the last progress, by the monotonic clock, which all processes of a host share
    longest: float  # longest time without progress in training
    longest_beginning: float  # longest time without progress in a beginning that reached its commit
    judged: float  # `longest` when the guardian looked last
    judged_beginning: float  # `longest_beginning` when the guardian looked last
    phase: int
    pauses: int
    paused: int  # 1 if there was a pause since the last progress
    generation: int
    commit: int
    commits: int
    changed: int  # commits of the whole run at which the state had changed
    agreed: int  # `changed` when the ranks agreed on a state last
    stepped: int  # optimizer steps since the last commit
    recorded: int  # batches recorded since the last commit
    rank: int
    stop: int
    stall: int  # seconds for which ranks may wait for one that says nothing, in training; 0 for ever
    stall_beginning: int  # the same in a beginning
    diverged: int  # how often its parameters were not those of most ranks
    in_run: int  # 1 once a function decorated by `run` was called

    _fields_ = [
        (name, ctypes.c_double if kind == "float" else ctypes.c_int64)
        for name, kind in __annotations__.items()
    ]

    def read(self) -> Reading:
        """Return the present contents."""
        return Reading(
            phase=Phase(self.phase),
            silent=max(0.0, time.monotonic() - self.stamp),
            longest=self.longest,
            longest_beginning=self.longest_beginning,
            paused=self.pauses > 0,
            waiting=self.paused > 0,
            commits=self.commits,
            generation=self.generation,
            commit=self.commit,
            steps=max(self.stepped, self.recorded),
            rank=self.rank,
            stop=Stop(self.stop),
            diverged=self.diverged,
            changed=self.changed,
            agreed=self.agreed,
            in_run=self.in_run > 0,
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

    def has_seen(self, longest: float, longest_beginning: float) -> None:
        """Note times without progress that another process has seen, as in `Reading`."""
        self.longest = max(longest, self.longest)
        self.longest_beginning = max(longest_beginning, self.longest_beginning)

    def allow_stalls(self, training: int, beginning: int) -> None:
        """Say how long ranks may wait for one that says nothing, in these phases; 0 for ever."""
        self.stall, self.stall_beginning = training, beginning

    def judged_by(self, reading: Reading) -> None:
        """Note that the guardian has read these longest times, and judges by them."""
        self.judged, self.judged_beginning = reading.longest, reading.longest_beginning

    @property
    def is_judged(self) -> bool:
        """Return whether the guardian has judged by the longest times that are known."""
        return self.judged >= self.longest and self.judged_beginning >= self.longest_beginning


_page = Page.from_buffer(bytearray(SIZE))
_notes: int | None = None
_events: int | None = None
_seen = 0  # bytes of the notes that `stalled` has read
_beginning = 0.0  # longest time without progress in the present beginning
_at_progress: list[Callable[[], None]] = []
_at_commit: list[Callable[[], None]] = []


def attach(page: int, notes: int, events: int | None = None) -> None:
    """Use the page of the guardian that started this process.

    Args:
        page: file descriptor of the page.
        notes: file descriptor that takes notes for the guardian.
        events: file descriptor of the pipe that takes events for the guardian.

    Raises:
        OSError: they are not open.
    """
    global _page, _notes, _events
    _page = Page.from_buffer(mmap.mmap(page, SIZE))
    _notes, _events = notes, events
    if _page.phase in (Phase.UNKNOWN, Phase.READY):
        enter(Phase.STARTING)


def watched() -> bool:
    """Return whether a guardian reads this process's page."""
    return _notes is not None


def event_pipe() -> int | None:
    """Return the file descriptor of the pipe that takes events for the guardian; None without a guardian."""
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
    elif page.phase in (_TRAINING, _PLAIN):
        page.longest = max(gap, page.longest)
    elif page.phase == _BEGINNING:
        _beginning = max(gap, _beginning)


def stepped() -> None:
    """Note an optimizer step."""
    _page.stepped += 1
    heartbeat()


def recorded() -> None:
    """Note a recorded batch."""
    _page.recorded += 1
    heartbeat()


def committed(generation: int, commit: int, changed: int) -> None:
    """Note a commit; no step, as a script may commit before its first one. Arguments as of `stand_at`."""
    _progressed()
    stand_at(generation, commit, changed)
    _page.commits += 1
    if _page.phase == _BEGINNING:
        _page.has_seen(0.0, _beginning)
    if _page.phase in (Phase.STARTING, _BEGINNING):
        _page.phase = _TRAINING
    if _at_commit:
        _run(_at_commit)


def stand_at(generation: int, commit: int, changed: int) -> None:
    """Note which commit the process is at, after a commit or a recovery.

    Args:
        generation: its generation.
        commit: its number.
        changed: commits of the whole run up to it at which the state had changed.
    """
    _page.generation, _page.commit = generation, commit
    _page.changed = changed
    _page.stepped = _page.recorded = 0


def commits() -> int:
    """Return how many commits this process has made."""
    return _page.commits


def steps() -> int:
    """Return how many steps this process has done since its last commit."""
    return max(_page.stepped, _page.recorded)


def enter(phase: Phase) -> None:
    """Set the phase of this process."""
    _page.phase = phase
    _page.touch()


def initialised(rank: int) -> None:
    """Note that ``hvd.init()`` has returned, so the script's own code runs now."""
    if _page.phase == Phase.STARTING and not _page.in_run:
        _page.rank = rank
        enter(Phase.PLAIN)


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
    """Note the process's rank."""
    _page.rank = rank


def longest() -> tuple[float, float]:
    """The longest times without progress in training and in beginnings, in seconds, of any rank."""
    return _page.longest, _page.longest_beginning


def has_seen(longest: float, longest_beginning: float) -> None:
    """Note times without progress that another rank has seen."""
    _page.has_seen(longest, longest_beginning)


def read() -> Reading:
    """Return the contents of this process's page."""
    return _page.read()


def await_guardian() -> None:
    """Wait until the guardian has read the longest times; it reads the page several times a second."""
    deadline = time.monotonic() + _PATIENCE
    while watched() and not _page.is_judged and time.monotonic() < deadline:
        time.sleep(0.01)


def diverged() -> None:
    """Note that this process's parameters are not those of most ranks."""
    _page.diverged += 1


def stop_asked() -> Stop:
    """Return the request to stop that this process has got; `Stop.NO` without one."""
    return Stop(_page.stop)


def ask_to_stop(stop: Stop) -> None:
    """Ask this process to stop at its next commit."""
    _page.ask(stop)


def stall_seconds() -> int:
    """Return for how many seconds this rank waits for a silent one; 0: no limit, as inside `paused`."""
    phase = _page.phase
    if _page.pauses or _page.paused or phase not in (_TRAINING, _BEGINNING):
        return 0
    return _page.stall if phase == _TRAINING else _page.stall_beginning


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


def stalled() -> dict[int, list[str]]:
    """Return the tensors that wait for each rank, if Horovod has noted it here since the last call."""
    global _seen
    if _notes is None:
        return {}
    start, _seen = _seen, os.fstat(_notes).st_size
    return stalled_since(_notes, start)
