"""Signs of life: a page of memory that a training process writes and its guardian reads.

The page holds 64-bit numbers, written one at a time by one process, so that no lock is needed. A process
without a guardian has a page, too, that nobody reads.
"""

from __future__ import annotations

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
_PATIENCE = 2.0  # seconds for a guardian to learn something


class Phase(IntEnum):
    """The phase of a training process."""

    UNKNOWN = 0  # it has not imported an adapter
    READY = 1  # a standby that waits
    STARTING = 2  # until the ranks have agreed on a state
    BEGINNING = 3  # from there to the next commit: on some ranks, functions are compiled now
    TRAINING = 4
    RECOVERING = 5  # leaving the other ranks, the rendezvous with those that are there, agreeing on a state
    FINISHED = 6  # its training function has returned, and the finished mark is durable
    LEFT = 7  # it leaves after a preemption, with its last commit in safety
    REMOVED = 8  # its host is no longer part of the job


class Stop(IntEnum):
    """The requests of a guardian to its training process, for the next commit."""

    NO = 0
    HOST = 1  # this host leaves
    JOB = 2  # all leave


class _Field(IntEnum):
    """Places of the numbers: of what is counted, unless they are of seconds."""

    STAMP = 0  # when there was progress last, by the monotonic clock, which all processes of a host share
    LONGEST = 1  # longest time without progress in training
    PHASE = 2
    PAUSES = 3
    COMMITS = 4
    GENERATION = 5
    COMMIT = 6
    STEPPED = 7  # optimizer steps since the last commit
    RECORDED = 8  # batches recorded since the last commit
    RANK = 9
    STOP = 10
    STALL = 11
    PAUSED = 12  # whether there was a pause since the last progress
    DIVERGED = 13  # how often its parameters were not those of most ranks
    LONGEST_BEGINNING = 14  # seconds: longest time without progress in a beginning that came to its commit
    STALL_BEGINNING = 15
    JUDGED = 16  # seconds: `LONGEST` when the guardian has looked last
    JUDGED_BEGINNING = 17  # the same of `LONGEST_BEGINNING`
    CHANGED = 18  # commits of the whole run at which the state had changed
    AGREED = 19  # the same when the ranks agreed on a state last


_STAMP, _LONGEST, _PHASE = _Field.STAMP, _Field.LONGEST, _Field.PHASE
_TRAINING, _BEGINNING = Phase.TRAINING, Phase.BEGINNING
_PAUSES, _PAUSED = _Field.PAUSES, _Field.PAUSED
_STEPPED, _RECORDED = int(_Field.STEPPED), int(_Field.RECORDED)


@dataclass(frozen=True)
class Reading:
    """The contents of a page.

    Attributes:
        phase: what the process is at.
        silent: seconds since its last progress.
        longest: the longest time without progress in training, in seconds, of any rank.
        longest_beginning: the same of beginnings that are over; 0 if none is.
        paused: whether it is in a phase that it has said to be long.
        waiting: whether it has left such a phase, without progress since: others may still be in theirs.
        commits: how many commits this process has made.
        generation: of its last commit; 0 before the first.
        commit: number of its last commit.
        steps: steps since then.
        rank: its rank, or -1.
        stop: what it has been asked for, by its guardian or a signal.
        diverged: how often its parameters were not those of most ranks.
        changed: commits of the whole run, up to its last one, at which the state had changed.
        agreed: the same of the commit that it resumed from.
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

    @property
    def point(self) -> tuple[int, int]:
        """Return how far the training has come: commits at which the state had changed, and steps since."""
        return self.changed, self.steps


class Page:
    """The page.

    Args:
        memory: its bytes; at least `SIZE` of them.
    """

    def __init__(self, memory: Any) -> None:
        view = memoryview(memory)
        self.seconds = view.cast("d")
        self.counts = view.cast("q")

    def read(self) -> Reading:
        """Return what it says now."""
        counts = self.counts
        return Reading(
            phase=Phase(counts[_Field.PHASE]),
            silent=max(0.0, time.monotonic() - self.seconds[_Field.STAMP]),
            longest=self.seconds[_Field.LONGEST],
            longest_beginning=self.seconds[_Field.LONGEST_BEGINNING],
            paused=counts[_Field.PAUSES] > 0,
            waiting=counts[_Field.PAUSED] > 0,
            commits=counts[_Field.COMMITS],
            generation=counts[_Field.GENERATION],
            commit=counts[_Field.COMMIT],
            steps=max(counts[_Field.STEPPED], counts[_Field.RECORDED]),
            rank=counts[_Field.RANK],
            stop=Stop(counts[_Field.STOP]),
            diverged=counts[_Field.DIVERGED],
            changed=counts[_Field.CHANGED],
            agreed=counts[_Field.AGREED],
        )

    def begin(self, phase: Phase) -> None:
        """Note the beginning of a process's life."""
        self.counts[_Field.RANK] = -1
        self.counts[_Field.PHASE] = phase
        self.touch()

    def touch(self) -> None:
        """Count the time without progress from now on."""
        self.seconds[_Field.STAMP] = time.monotonic()

    def ask(self, stop: Stop) -> None:
        """Ask the process to stop at its next commit."""
        self.counts[_Field.STOP] = max(stop, self.counts[_Field.STOP])

    def has_seen(self, longest: float, longest_beginning: float) -> None:
        """Note times without progress that another process has seen, as in `Reading`."""
        for place, seconds in ((_LONGEST, longest), (_Field.LONGEST_BEGINNING, longest_beginning)):
            self.seconds[place] = max(seconds, self.seconds[place])

    def allow_stalls(self, training: int, beginning: int) -> None:
        """Say how long ranks may wait for one that says nothing, in these phases; 0 for ever."""
        self.counts[_Field.STALL], self.counts[_Field.STALL_BEGINNING] = training, beginning

    def judged_by(self, reading: Reading) -> None:
        """Say that the guardian has judged by these longest times."""
        self.seconds[_Field.JUDGED] = reading.longest
        self.seconds[_Field.JUDGED_BEGINNING] = reading.longest_beginning

    @property
    def is_judged(self) -> bool:
        """Return whether the guardian has judged by the longest times that are known."""
        pairs = ((_Field.JUDGED, _LONGEST), (_Field.JUDGED_BEGINNING, _Field.LONGEST_BEGINNING))
        return all(self.seconds[judged] >= self.seconds[known] for judged, known in pairs)


_page = Page(bytearray(SIZE))
_seconds, _counts = _page.seconds, _page.counts
_notes: int | None = None
_events: int | None = None
_seen = 0  # bytes of the notes in which reports of stalls were looked for
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
        OSError: they are none.
    """
    global _page, _seconds, _counts, _notes, _events
    _page = Page(mmap.mmap(page, SIZE))
    _seconds, _counts, _notes, _events = _page.seconds, _page.counts, notes, events
    if _counts[_PHASE] in (Phase.UNKNOWN, Phase.READY):
        enter(Phase.STARTING)


def watched() -> bool:
    """Return whether a guardian reads this process's page."""
    return _notes is not None


def event_pipe() -> int | None:
    """Return the file descriptor of the pipe that takes events for the guardian; None without a guardian."""
    return _events


def heartbeat() -> None:
    """Report progress; called by training scripts wherever a long phase gets on.

    Examples:
        >>> for chunk in range(3):  # of something long
        ...     recover.heartbeat()
    """
    _progressed()
    if _at_progress:
        _run(_at_progress)


def _progressed() -> None:
    global _beginning
    now = time.monotonic()
    gap = now - _seconds[_STAMP]
    _seconds[_STAMP] = now
    if _counts[_PAUSED]:
        _counts[_PAUSED] = 0
    elif _counts[_PAUSES]:
        return
    elif _counts[_PHASE] == _TRAINING:
        if gap > _seconds[_LONGEST]:
            _seconds[_LONGEST] = gap
    elif _counts[_PHASE] == _BEGINNING:
        _beginning = max(gap, _beginning)


def stepped() -> None:
    """Note an optimizer step."""
    _counts[_STEPPED] += 1
    heartbeat()


def recorded() -> None:
    """Note a recorded batch."""
    _counts[_RECORDED] += 1
    heartbeat()


def committed(generation: int, commit: int, changed: int) -> None:
    """Note a commit; no step, as a script may commit before its first one. Arguments as of `stand_at`."""
    _progressed()
    stand_at(generation, commit, changed)
    _counts[_Field.COMMITS] += 1
    if _counts[_PHASE] == _BEGINNING:
        _page.has_seen(0.0, _beginning)
    if _counts[_PHASE] in (Phase.STARTING, _BEGINNING):
        _counts[_PHASE] = _TRAINING
    if _at_commit:
        _run(_at_commit)


def stand_at(generation: int, commit: int, changed: int) -> None:
    """Note which commit the process is at, after a commit or a recovery.

    Args:
        generation: its generation.
        commit: its number.
        changed: commits of the whole run up to it at which the state had changed.
    """
    _counts[_Field.GENERATION], _counts[_Field.COMMIT] = generation, commit
    _counts[_Field.CHANGED] = changed
    _counts[_STEPPED] = _counts[_RECORDED] = 0


def commits() -> int:
    """Return how many commits this process has made."""
    return int(_counts[_Field.COMMITS])


def steps() -> int:
    """Return how many steps this process has done since the commit that it was at last."""
    return int(max(_counts[_STEPPED], _counts[_RECORDED]))


def enter(phase: Phase) -> None:
    """Note what the process is at now."""
    _counts[_PHASE] = phase
    _page.touch()


def resume() -> None:
    """Note that the ranks have agreed on a state, and resume from it."""
    global _beginning
    _beginning = 0.0
    _counts[_Field.AGREED] = _counts[_Field.CHANGED]
    enter(Phase.BEGINNING)


def take_rank(rank: int) -> None:
    """Note the process's rank."""
    _counts[_Field.RANK] = rank


def longest() -> tuple[float, float]:
    """The longest times without progress in training and in beginnings, in seconds, of any rank."""
    return _seconds[_LONGEST], _seconds[_Field.LONGEST_BEGINNING]


def has_seen(longest: float, longest_beginning: float) -> None:
    """Note times without progress that another rank has seen."""
    _page.has_seen(longest, longest_beginning)


def read() -> Reading:
    """Return what this process's page says."""
    return _page.read()


def await_guardian() -> None:
    """Wait until the guardian has learnt the longest times; it looks several times a second."""
    deadline = time.monotonic() + _PATIENCE
    while watched() and not _page.is_judged and time.monotonic() < deadline:
        time.sleep(0.01)


def diverged() -> None:
    """Note that this process's parameters are not those of most ranks."""
    _counts[_Field.DIVERGED] += 1


def stop_asked() -> Stop:
    """Return what has been asked of this process."""
    return Stop(_counts[_Field.STOP])


def ask_to_stop(stop: Stop) -> None:
    """Ask this process to stop at its next commit."""
    _page.ask(stop)


def stall_seconds() -> int:
    """Return how long this rank may wait for one that says nothing; 0 for ever, as in a known long phase."""
    phase = _counts[_PHASE]
    if _counts[_PAUSES] or _counts[_PAUSED] or phase not in (_TRAINING, _BEGINNING):
        return 0
    return int(_counts[_Field.STALL if phase == _TRAINING else _Field.STALL_BEGINNING])


@contextmanager
def paused() -> Iterator[None]:
    """Let what is inside take as long as it likes without progress, on all ranks.

    All ranks must enter it, also those that have nothing to do in it: they wait for the others afterwards.
    """
    _counts[_PAUSES] += 1
    _page.touch()
    try:
        yield
    finally:
        _page.touch()
        _counts[_PAUSED] = 1
        _counts[_PAUSES] -= 1


def at_progress(callback: Callable[[], None]) -> None:
    """Have a function called once, at the next step or heartbeat."""
    _at_progress.append(callback)


def at_commit(callback: Callable[[], None]) -> None:
    """Have a function called once, at the next commit."""
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
    """Return the notes of a training process from this byte on: of each fact the last one."""
    notes: dict[str, Any] = {}
    size = os.fstat(descriptor).st_size
    for line in os.pread(descriptor, size - start, start).splitlines():
        try:
            notes.update(json.loads(line))
        except ValueError:  # it was killed as it wrote
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
