"""Messages of a training process to its guardian: heartbeats, notes, and the error that ends it.

Heartbeats are a page of memory that the process writes and its guardian reads. Notes are lines of JSON.

The page holds 64-bit numbers, written one at a time by one process, so no lock is needed. Without a guardian,
the process writes to private memory instead.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

from hvdrecover import error_kinds, texts

SIZE = mmap.PAGESIZE
_PATIENCE = 2.0  # seconds for the guardian to read the page
_ENDING = 5.0  # seconds for a process to end after an error; then it shows the error itself


class Phase(IntEnum):
    UNKNOWN = 0  # it has not imported an adapter
    READY = 1  # a standby that waits
    STARTING = 2  # until the ranks have agreed on a state
    BEGINNING = 3  # until the next commit: ranks may compile functions now, which takes long
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
    longest: float = 0.0  # the longest time without progress of any rank, in seconds; 0 before one has ended
    paused: bool = False  # whether the process is inside `paused`
    waiting: bool = False  # it has left `paused` and made no progress since; other ranks may still be inside
    commits: int = 0  # commits of this process
    generation: int = 0  # of its last commit; 0 before the first
    commit: int = 0  # number of its last commit
    steps: int = 0  # steps since then
    rank: int = -1  # -1 if it has none
    stop: Stop = Stop.NO  # the request to stop, by its guardian or a signal
    diverged: int = 0  # how often its parameters differed from those of most ranks
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
    """The page: 64-bit numbers. `Reading` explains those that it has, too."""

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
    stall: int  # limit in seconds for waiting for a silent rank, in training; 0: no limit
    stall_beginning: int  # the same in a beginning
    looks: int  # how often the guardian has set these two limits
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
        self.rank, self.phase = -1, phase
        self.touch()

    def touch(self) -> None:
        self.stamp = time.monotonic()

    def ask(self, stop: Stop) -> None:
        self.stop = max(stop, self.stop)

    def has_seen(self, seconds: float) -> None:
        """Note a time without progress, perhaps of another process; see `Reading.longest`."""
        self.longest = max(seconds, self.longest)

    def allow_stalls(self, training: int, beginning: int) -> None:
        """Limit how long ranks may wait for a silent rank, in these phases; in seconds, 0: no limit."""
        self.stall, self.stall_beginning = training, beginning
        self.looks += 1

    def stand_at(self, generation: int, commit: int, changed: int) -> None:
        """Note which commit the process is at, after a commit or a recovery; see `Reading`."""
        self.generation, self.commit, self.changed = generation, commit, changed
        self.stepped = self.recorded = 0


page = Page.from_buffer(bytearray(SIZE))
"""The page of this process."""
event_pipe: int | None = None
"""The file descriptor of the pipe that takes events for the guardian."""
_notes: int | None = None
_hook: object = None  # the hook for uncaught errors that this module has set last
_beginning = 0.0  # longest time without progress in the present beginning
_at_progress: list[Callable[[], None]] = []
_at_commit: list[Callable[[], None]] = []


def attach(memory: int, notes: int, events: int | None = None) -> None:
    """Use the page and the pipes of the guardian that started this process, by their file descriptors."""
    global page, _notes, event_pipe
    page = Page.from_buffer(mmap.mmap(memory, SIZE))
    _notes, event_pipe = notes, events
    if page.phase in (Phase.UNKNOWN, Phase.READY):
        enter(Phase.STARTING)


def watched() -> bool:
    return _notes is not None


def heartbeat() -> None:
    """Report progress. Call it in long phases without steps, so that the process does not count as hanging.

    Examples:
        >>> for chunk in range(3):  # of a long evaluation
        ...     recover.heartbeat()
    """
    progressed()
    if _at_progress:
        _run(_at_progress)


def progressed() -> None:
    """Note progress that is not a step: it calls no function that waits for one."""
    global _beginning
    now = time.monotonic()
    gap, page.stamp = now - page.stamp, now
    if page.paused:
        page.paused = 0
    elif page.pauses:
        return
    elif page.phase in (Phase.TRAINING, Phase.PLAIN):
        page.has_seen(gap)
    elif page.phase == Phase.BEGINNING:  # `committed` adds it to the longest
        _beginning = max(gap, _beginning)


def stepped() -> None:
    page.stepped += 1
    heartbeat()


def recorded() -> None:
    page.recorded += 1
    heartbeat()


def committed(generation: int, commit: int, changed: int) -> None:
    """Note a commit. It does not count as a step, as a script may commit before its first step."""
    progressed()
    page.stand_at(generation, commit, changed)
    page.commits += 1
    if page.phase == Phase.BEGINNING:
        page.has_seen(_beginning)
    if page.phase in (Phase.STARTING, Phase.BEGINNING):
        page.phase = Phase.TRAINING
    if _at_commit:
        _run(_at_commit)


def enter(phase: Phase) -> None:
    page.phase = phase
    page.touch()


def initialised(rank: int) -> None:
    """Note that ``hvd.init()`` has returned, so the script's own code runs now."""
    if page.phase == Phase.STARTING and not page.in_run:
        page.rank = rank
        enter(Phase.PLAIN)


def training_begins(*, in_run: bool) -> None:
    """Note a call of ``state.resume()``, or of a function decorated by `run`."""
    page.in_run |= in_run
    if page.phase == Phase.PLAIN:
        enter(Phase.STARTING)


def lost_ranks(error: str) -> None:
    """Note an error that Horovod raises when ranks are lost: the script may catch it and exit in any way."""
    if not page.in_run:  # `run` handles such errors by itself
        notify(lost=error)


def resume() -> None:
    """Note that the ranks have agreed on a state, and resume from it."""
    global _beginning
    _beginning = 0.0
    page.agreed = page.changed
    enter(Phase.BEGINNING)


def await_guardian() -> None:
    """Wait until the guardian has set the limits by the present longest time; it does so at each look."""
    enough = page.looks + 2  # it may be in the middle of a look
    deadline = time.monotonic() + _PATIENCE
    while watched() and page.looks < enough and time.monotonic() < deadline:
        time.sleep(0.01)


def stall_seconds() -> int:
    """Return for how many seconds this rank waits for a silent one; 0: no limit, as inside `paused`."""
    if page.pauses or page.paused:
        return 0
    return {Phase.TRAINING: page.stall, Phase.BEGINNING: page.stall_beginning}.get(Phase(page.phase), 0)


@contextmanager
def paused() -> Iterator[None]:
    """Allow the code inside to take any time without progress, on all ranks.

    All ranks must enter it, even ranks without work there: they wait for the others afterwards.
    """
    page.pauses += 1
    page.touch()
    try:
        yield
    finally:
        page.touch()
        page.paused = 1
        page.pauses -= 1


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
        _write(_notes, facts)


def _write(notes: int, facts: dict[str, Any]) -> None:
    os.write(notes, f"{json.dumps(facts)}\n".encode())


def notes_since(descriptor: int, start: int) -> dict[str, Any]:
    """Return the facts noted from byte ``start`` on; later values win."""
    notes: dict[str, Any] = {}
    size = os.fstat(descriptor).st_size
    for line in os.pread(descriptor, size - start, start).splitlines():
        with suppress(ValueError):  # the process was killed while it wrote the line
            notes.update(json.loads(line))
    return notes


# -- the error that ends the process: its guardian prints it once, after all other output -------------------


def report_errors_to(notes: int) -> None:
    """Report the error that ends this process in the guardian's notes, by their file descriptor."""
    global _hook
    if sys.excepthook is _hook:
        return
    # `launch.early` installs a hook that calls this function; `before` is the hook that it replaced.
    previous, process = getattr(sys.excepthook, "before", sys.excepthook), os.getpid()
    # If the script or a library has set its own hook, that hook prints the error.
    prints = previous is not sys.__excepthook__

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        forked = os.getpid() != process
        stopped = forked or issubclass(kind, KeyboardInterrupt)
        if stopped or not _reported(notes, error, printed=prints) or prints:
            previous(kind, error, trace)
            return
        # The exit may wait for other threads, perhaps forever. The error must be shown anyway.
        late = threading.Timer(_ENDING, _show, (notes, previous, kind, error, trace))
        late.daemon = True
        late.start()

    sys.excepthook = _hook = report


def _reported(notes: int, error: BaseException, *, printed: bool) -> bool:
    text = "".join(traceback.format_exception(error))
    short = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):  # which names file and line by itself
        short = f"{type(error).__name__}: {error}"
    frames = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    where = texts.script_line(error) or "".join(frames[-1:])
    identity = f"{type(error).__qualname__} at {where}"  # texts vary: process ids, addresses, generations
    kinds = error_kinds.kinds(error)
    return _noted(notes, error=short, identity=identity, traceback=text, kinds=kinds, unprinted=not printed)


def _show(notes: int, previous: Callable[..., object], *error: object) -> None:
    if _noted(notes, unprinted=False):
        previous(*error)


def _noted(notes: int, **facts: object) -> bool:
    try:
        _write(notes, facts)
    except (OSError, ValueError):  # a program in between has closed file descriptors that it did not know
        return False
    return True
