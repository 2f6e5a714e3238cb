"""A scheduler under which threads of product code run one at a time, in an order that a seed decides.

1. A simulated process is a group of real threads, its *tasks*. One task of all processes has the *baton* and
   runs; the others wait for it.
2. Each call that could wait, and each operation that other processes can see, hands the baton on: locks,
   events, sleeps, storage, collectives. The seed's generator chooses the next task.
3. Time stands still while any task can run. If none can, the clock jumps to the next deadline. If there is no
   deadline either, the processes wait for each other for ever: a finding.
4. A process that dies runs no further. `Died` unwinds its threads at once. Each simulated operation raises
   `Died` again, so ``finally`` blocks have no effect that others could see.
5. Module globals of the package, such as the heartbeat's page, belong to a process. They are exchanged when
   the baton goes from one process to another.
"""

from __future__ import annotations

import ast
import copy
import errno
import fcntl
import functools
import inspect
import math
import os
import pathlib
import random
import shutil
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hvdrecover import heartbeat, machine

_PACKAGE = "hvdrecover."
_ASKS_PROC = "hvdrecover.machine"  # about this very process: there, only the time is simulated
HANDLER_FAILS = "the script's handler of log lines has failed"
_MOST = 60_000  # times that the baton may be handed on
_START = 1_800_000_000.0  # the wall clock at the beginning, in seconds since the Unix epoch


class Died(BaseException):
    """Unwinds the threads of a process that has died; no handler of errors catches it."""


class Process:
    """A simulated process."""

    def __init__(self, scheduler: Scheduler, name: str, host: str) -> None:
        self.name = name  # for the transcript
        self.host = host  # name of its host
        self.pid = scheduler.next_pid()  # its number
        self.dead = False  # whether it has died, or ended
        self.stopped = False  # whether it has been stopped, as by SIGSTOP
        self.skew = 0.0  # seconds by which its wall clock is ahead
        self.globals = [(module, name, fresh()) for module, name, fresh in scheduler.process_globals]


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Process, name: str, function: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.function = function
        self.baton = threading.Lock()
        self.baton.acquire()
        self.until: Callable[[], bool] | None = None  # what it waits for; None if it can run
        self.deadline = math.inf  # when it stops waiting
        self.done = False

    def is_ready(self, now: float) -> bool:
        if self.process.stopped:
            return False
        return self.until is None or now >= self.deadline or self.until()


class Scheduler:
    """Runs tasks one at a time; the seed decides everything."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)  # the generator of the order of tasks and of all else that is random
        self.now = 100.0  # the monotonic clock, in seconds
        self.events = 0  # how often the baton was handed on
        self.order = 0  # a checksum of all choices
        self.transcript: list[str] = []  # lines for people
        self.failure: str | None = None  # the first finding
        self.before_event: Callable[[], None] = lambda: None  # called each time before the baton is handed on
        self.process_globals = _process_globals()
        self._pids = 1000
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._entered: Process | None = None
        self._originals = [module[name] for module, name, _ in self.process_globals]
        self._over = False
        self._main = threading.Lock()
        self._main.acquire()

    # -- processes and tasks -----------------------------------------------------------------------------

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    @property
    def current(self) -> Task | None:
        """The task that runs; None in a thread that is not simulated."""
        return getattr(_thread, "task", None)

    @property
    def process(self) -> Process:
        """The process that runs."""
        task = self.current
        assert task is not None, "not in a simulated thread"
        return task.process

    def start(self, process: Process, name: str, function: Callable[[], object]) -> Task:
        """Start a task."""
        task = Task(process, name, function)
        self._tasks.append(task)
        threading.Thread(target=self._live, args=(task,), name=name, daemon=True).start()
        return task

    def kill(self, process: Process) -> None:
        """End a process. Its other threads unwind before anything else runs; so does the caller's."""
        process.dead, process.stopped = True, False

    def check(self) -> None:
        """Raise `Died` in a thread of a process that has died."""
        task = self.current
        if task is not None and (task.process.dead or self._over):
            raise Died

    def run(self) -> None:
        """Run until no task is left, or something is found; see `failure`."""
        if self._tasks:
            self._hand_to(self._choose())
            self._main.acquire()
        self._over = True
        for task in list(self._tasks):  # unwind their threads
            self._enter(task.process)
            task.baton.release()
            self._main.acquire()
        self._enter(None)

    def stop(self) -> None:
        """End the simulation; called by a task, which unwinds as all others do."""
        self._over = True
        raise Died

    def fail(self, reason: str) -> None:
        """Note a finding, and end the simulation at the next event."""
        if self.failure is None:
            self.failure = reason
            self.say(f"FOUND: {reason}")

    def say(self, text: str, process: Process | None = None) -> None:
        """Add a line to the transcript."""
        task = self.current
        who = process or (task.process if task is not None else None)
        name = who.name if who is not None else "the test"
        self.transcript.append(f"{self.now - 100:8.2f} s  {name:<12} {text}")

    # -- waiting -----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Let any other task run."""
        task = self._mine()
        task.until = None
        self._switch(task)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.wait(_never, seconds)

    def wait(self, until: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait until something is so; return False if the time is over."""
        task = self._mine()
        task.until, task.deadline = until, self.now + seconds
        self._switch(task)
        task.until = None
        return until()

    def _mine(self) -> Task:
        task = self.current
        assert task is not None, "not in a simulated thread"
        if task.process.dead or self._over:
            raise Died
        return task

    def _switch(self, task: Task) -> None:
        following = self._choose()
        if following is not task:
            self._hand_to(following)
            task.baton.acquire()
        if task.process.dead or self._over:
            raise Died

    def _hand_to(self, task: Task | None) -> None:
        if task is None:
            self._main.release()
        else:
            self._enter(task.process)
            task.baton.release()

    def _choose(self) -> Task | None:
        """Return the next task; None if the simulation is over."""
        if self._over:
            return None
        self.before_event()
        while self.failure is None:
            for task in self._tasks:
                if task.process.dead:
                    return task
            ready = [task for task in self._tasks if task.is_ready(self.now)]
            if ready:
                self.events += 1
                if self.events > _MOST:
                    self.fail(f"no end after {_MOST} events: {self._whereabouts()}")
                    break
                chosen = ready[0] if len(ready) == 1 else ready[int(self.dice.random() * len(ready))]
                place = self._tasks.index(chosen) + 64 * len(ready)
                self.order = (self.order * 1_000_003 + place) % (2**61 - 1)
                return chosen
            if not self._tasks:
                return None
            then = min((task.deadline for task in self._tasks if not task.process.stopped), default=math.inf)
            if then == math.inf:
                self.fail(f"all wait for each other: {self._whereabouts()}")
                break
            self.now = max(self.now, then)
        self._over = True
        return None

    def _whereabouts(self) -> str:
        return "; ".join(f"{task.process.name}/{task.name}" for task in self._tasks)

    def _live(self, task: Task) -> None:
        _thread.task = task
        task.baton.acquire()
        try:
            if not (task.process.dead or self._over):
                task.function()
        except Died:
            pass
        except BaseException as error:
            if not (task.process.dead or self._over):
                self.fail(f"an error ended {task.process.name}/{task.name}: {told(error)}")
        task.done = True
        self._tasks.remove(task)
        self._hand_to(None if self._over else self._choose())

    # -- module globals that belong to a process ---------------------------------------------------------

    def _enter(self, process: Process | None) -> None:
        if process is self._entered:
            return
        if self._entered is not None:
            self._entered.globals = [
                (module, name, module[name]) for module, name, _ in self._entered.globals
            ]
        if process is None:
            for (module, name, _), value in zip(self.process_globals, self._originals, strict=True):
                module[name] = value
        else:
            for module, name, value in process.globals:
                module[name] = value
        self._entered = process


class _Thread(threading.local):
    task: Task | None = None


_thread = _Thread()


def _never() -> bool:
    return False


def told(error: BaseException) -> str:
    """Return an error with the places of the package that it came through."""
    frames = [
        f"{frame.filename.rpartition('/hvdrecover/')[2]}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/hvdrecover/" in frame.filename or "/tests/" in frame.filename
    ]
    return f"{type(error).__name__}: {error} [{' > '.join(frames[-6:])}]"


_found_globals: list[tuple[dict[str, Any], str, Callable[[], Any]]] = []


def _process_globals() -> list[tuple[dict[str, Any], str, Callable[[], Any]]]:
    """Return the package's globals that belong to a process (``global`` names and private containers)."""
    if not _found_globals:
        for name, module in sorted(sys.modules.items()):
            is_ours = name.startswith((f"{_PACKAGE}state.", f"{_PACKAGE}checkpoint.", f"{_PACKAGE}heartbeat"))
            if is_ours and str(module.__file__).endswith(".py"):  # not the compiled ones
                _found_globals.extend(_of_process(module))
    return _found_globals


def _of_process(module: ModuleType) -> Iterator[tuple[dict[str, Any], str, Callable[[], Any]]]:
    names = {
        name
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Global)
        for name in node.names
    }
    space = vars(module)
    for name, value in sorted(space.items()):
        if isinstance(value, heartbeat.Page):
            yield space, name, lambda: heartbeat.Page.from_buffer(bytearray(heartbeat.SIZE))
        elif name in names or (
            name.startswith("_") and name.islower() and type(value) in (list, dict, set) and "__" not in name
        ):
            yield space, name, functools.partial(copy.copy, copy.copy(value))


# -- what replaces the standard library in the package ---------------------------------------------------


class _Replaced:
    """A module with some of its names replaced."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Lock:
    """A lock of simulated threads."""

    _reentrant = False

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler._mine()
        if self._reentrant and self._owner is task:
            self._count += 1
            return True
        if not blocking and self._owner is not None:
            return False
        self._scheduler.pause()
        if self._owner is not None:
            seconds = math.inf if timeout < 0 else timeout
            if not self._scheduler.wait(lambda: self._owner is None, seconds):
                return False
        self._owner, self._count = task, 1
        return True

    def release(self) -> None:
        task = self._scheduler.current
        if task is None or task.process.dead or self._scheduler._over:
            return
        assert self._owner is not None
        self._count -= 1
        if not self._count:
            self._owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its owner may take again."""

    _reentrant = True


class Event:
    """An event of simulated threads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._scheduler.check()
        self._set = True

    def clear(self) -> None:
        self._scheduler.check()
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        seconds = math.inf if timeout is None else max(0.0, timeout)
        return self._scheduler.wait(self.is_set, seconds)


class Condition:
    """A condition of simulated threads."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or RLock(scheduler)
        self._notified = 0
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock, seen = self._lock, self._notified
        owner, count = lock._owner, lock._count
        lock._owner, lock._count = None, 0
        seconds = math.inf if timeout is None else max(0.0, timeout)
        told = self._scheduler.wait(lambda: self._notified != seen, seconds)
        if lock._owner is not None:
            self._scheduler.wait(lambda: lock._owner is None)
        lock._owner, lock._count = owner, count
        return told

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = math.inf if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()) and self._scheduler.now < end:
            self.wait(None if end == math.inf else end - self._scheduler.now)
        return result

    def notify(self, n: int = 1) -> None:
        self._scheduler.check()
        self._notified += 1  # all wake and look again, as they may at any time

    notify_all = notify


class Thread:
    """A thread of a simulated process."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._function = lambda: target(*args, **(kwargs or {}))
        self.name = name
        self.daemon = daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._scheduler.check()
        self._task = self._scheduler.start(self._scheduler.process, self.name, self._function)
        self._scheduler.pause()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        self._scheduler.wait(lambda: not self.is_alive(), math.inf if timeout is None else timeout)


class SimulatedClock(machine.Clock):
    """The clock of a process; see `hvdrecover.machine.Clock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now(self) -> float:
        self._scheduler.check()
        return _START + self._scheduler.now + self._scheduler.process.skew

    def monotonic(self) -> float:
        self._scheduler.check()
        return self._scheduler.now

    def wait(self, event: Event, timeout: float) -> bool:
        return event.wait(timeout)


@contextmanager
def installed(
    scheduler: Scheduler, more: Mapping[ModuleType, Mapping[str, Any]] | None = None
) -> Iterator[None]:
    """Have the package use simulated threads, time and process numbers; ``more`` replaces further names."""
    clock = SimulatedClock(scheduler)

    def unhandled(facts: Any) -> None:
        scheduler.check()
        if str(facts[1]) == HANDLER_FAILS:
            scheduler.say(f"reports an error: {facts[1]}")
        else:
            scheduler.fail(f"an error that nobody handles: {told(facts[1])}")

    def new_id() -> uuid.UUID:
        return uuid.UUID(int=scheduler.dice.getrandbits(128), version=4)

    def part(kind: type[Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: kind(scheduler, *args, **kwargs)

    def pausing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if scheduler.current is not None:
                scheduler.pause()
            return function(*args, **kwargs)

        return call

    holders: dict[tuple[int, int], tuple[Process, int]] = {}  # of locked files
    locked: set[int] = set()  # descriptors; a process that dies does not close its own

    def lock(descriptor: int, operation: int) -> None:
        """Lock a file for a simulated process, as all of them are one process to the system."""
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        holder = holders.get(file)
        if holder is not None and holder[0] is not scheduler.process and not holder[0].dead:
            raise BlockingIOError(errno.EAGAIN, "another simulated process has the lock")
        holders[file] = scheduler.process, descriptor
        locked.add(descriptor)

    close_file = (more or {}).get(os, {}).get("close", os.close)

    def close(descriptor: int) -> None:
        for file, holder in list(holders.items()):
            if holder == (scheduler.process, descriptor):
                del holders[file]
        locked.discard(descriptor)
        close_file(descriptor)

    replaced: dict[ModuleType, Any] = {
        threading: _Replaced(
            threading,
            Lock=part(Lock),
            RLock=part(RLock),
            Event=part(Event),
            Condition=part(Condition),
            Thread=part(Thread),
            excepthook=unhandled,
        ),
        time: _Replaced(time, monotonic=clock.monotonic, time=clock.now, sleep=scheduler.sleep),
        os: _Replaced(
            os,
            getpid=lambda: scheduler.process.pid,
            setpriority=lambda *_: None,
            getpriority=lambda *_: 0,
            **{**(more or {}).get(os, {}), "close": close},
        ),
        fcntl: _Replaced(fcntl, lockf=lock),
        uuid: _Replaced(uuid, uuid4=new_id),
        shutil: _Replaced(shutil, rmtree=pausing(shutil.rmtree)),
    }
    for module, names in (more or {}).items():
        replaced.setdefault(module, _Replaced(module, **names))
    files = {name: pausing(getattr(os, name)) for name in ("rename", "replace", "unlink", "mkdir")}
    undo: list[tuple[dict[str, Any], str, Any]] = [(vars(pathlib), "os", os)]
    vars(pathlib)["os"] = _Replaced(os, **files)  # what `Path` does to the near tier's files
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith(_PACKAGE):
            for name, value in list(vars(module).items()):
                if module_name == _ASKS_PROC and value is not time:
                    continue
                if isinstance(value, ModuleType) and value in replaced:
                    undo.append((vars(module), name, value))
                    vars(module)[name] = replaced[value]
                    # Finalizers run in any thread, and need the number of the real process.
                    if value is os and any(each is weakref for each in vars(module).values()):
                        vars(module)[name] = _Replaced(replaced[os], getpid=os.getpid)
                elif isinstance(value, random.Random):
                    undo.append((vars(module), name, value))
                    vars(module)[name] = random.Random(scheduler.dice.getrandbits(32))
    try:
        yield
    finally:
        for space, name, value in undo:
            space[name] = value
        for descriptor in locked:
            os.close(descriptor)
