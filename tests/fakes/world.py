"""A Horovod job without Horovod: every rank is a thread, faults are data, and what hangs fails the test."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
from horovod.common.exceptions import HorovodInternalError

from hvdrecover.errors import RemovedError
from hvdrecover.state.adapter import Past
from hvdrecover.state.hooks import Preempted

HANG_SECONDS = 20.0  # far more than any rank ever needs

# ``kill`` ends the rank before the collective, ``kill_after`` after it, ``kill_all`` all ranks; ``cut`` lets
# it come through on the others only; ``change`` adds and removes hosts, and tells all ranks before it.
Action = Literal["kill", "kill_after", "kill_all", "cut", "change"]
Replacement = Literal["none", "in_place"]
Status = Literal["runs", "returned", "failed", "killed", "left"]

_current = threading.local()


class Killed(SystemExit):
    """Ends a thread as SIGKILL ends a process: no handler of errors sees it, and nobody hears of it."""


@dataclass
class Fault:
    """Something that happens when a rank comes to a collective; used once."""

    rank: int
    collective: str  # how the collective's name begins
    nth: int = 1  # at which of that rank's visits it happens
    action: Action = "kill"
    replacement: Replacement = "none"  # whether a process is started in the place of a killed one
    add: int = 0  # number of ranks that a change adds
    remove: tuple[int, ...] = ()  # ranks that a change removes
    ahead: bool = False  # whether the added ranks come before all others
    visits: int = 0  # how often the rank has come to the collective
    fired: bool = False  # whether it has happened

    def visit(self, rank: int, name: str) -> bool:
        """Count a visit; return whether the fault happens now."""
        if self.fired or rank != self.rank or not name.startswith(self.collective):
            return False
        self.visits += 1
        self.fired = self.visits == self.nth
        return self.fired


@dataclass
class _Slot:
    """One collective: what each rank brought to it."""

    signature: tuple[Any, ...]
    entries: dict[int, Any] = field(default_factory=dict)


@dataclass
class _Ring:
    """The ranks of a rendezvous."""

    members: list[FakeWorld]
    slots: dict[int, _Slot] = field(default_factory=dict)
    broken: bool = False


@dataclass
class Outcome:
    """The end of a rank."""

    world: FakeWorld
    status: Status
    result: Any = None
    error: BaseException | None = None


def _fail(error: Exception) -> NoReturn:
    raise error


class FakeWorld:
    """One rank; see `hvdrecover.state.adapter.World`."""

    def __init__(self, job: FakeJob, place: float, *, newcomer: bool) -> None:
        self.job = job
        self.place = place  # ranks are numbered in the order of their places
        self.newcomer = newcomer  # whether the process was started after the job
        self.status: Status = "runs"
        self.told: list[Callable[[float, int], None]] = []  # called when hosts come or go
        self.visits = 0  # number of collectives that it has come to
        self.rendezvouses = 0
        self.allowed: list[int] = []  # each limit of the waits of its collectives, in seconds
        self.past = Past()
        self._ring: _Ring | None = None
        self._place_in_ring = 0
        self._position = 0
        self._doomed = False
        self._leaving = False
        self._where = "nowhere yet"

    # -- World ---------------------------------------------------------------------------------------------

    def rank(self) -> int:
        self._present()
        return self._place_in_ring

    def size(self) -> int:
        return len(self._present().members)

    def init(self) -> None:
        with self.job.condition:
            if self._ring is not None:
                raise RuntimeError("init() without a shutdown() before it")
            self._where = "init()"
            self.job.rendezvous()
            self._wait(lambda: self._ring is not None or self._leaving)
            if self._leaving:
                self._end("left")
                raise RemovedError("the host has been removed from elastic job")

    def allow_stalls(self, seconds: int) -> None:
        self._present()
        if seconds != (self.allowed[-1] if self.allowed else 0):
            self.allowed.append(seconds)

    def lost(self, error: BaseException) -> bool:
        return False

    def shutdown(self) -> None:
        with self.job.condition:
            self._break_ring()
            self._ring = None

    def allgather(self, values: Sequence[int], name: str) -> npt.NDArray[np.int64]:
        return self.send(values, name)()

    def send(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        row = np.array(values, dtype=np.int64)
        try:
            await_rows = self._enter(("allgather", len(row)), name, row)
        except HorovodInternalError as error:
            return partial(_fail, error)
        return lambda: np.stack(await_rows())

    def gather(self, mine: bytes, name: str) -> list[bytes]:
        return self._exchange(("gather",), name, mine)

    def broadcast(self, buffer: npt.NDArray[np.uint8], root: int, name: str) -> None:
        mine = buffer.copy() if self.rank() == root else None
        entries = self._exchange(("broadcast", root, len(buffer)), name, mine)
        buffer[...] = entries[root]

    # -- what a training function needs ----------------------------------------------------------------------

    def allreduce(self, array: npt.NDArray[Any], name: str = "gradient") -> npt.NDArray[Any]:
        """The sum over all ranks, in the order of ranks, so that it is the same to the last bit."""
        entries = self._exchange(("allreduce", array.shape), name, array.copy())
        total: npt.NDArray[Any] = entries[0].copy()
        for entry in entries[1:]:
            total += entry
        return total

    @property
    def dead(self) -> bool:
        """Return whether the rank was killed; its thread may not have noticed."""
        return self._doomed or self.status == "killed"

    def check_alive(self) -> None:
        if self.dead:
            raise Killed

    # -- inside ----------------------------------------------------------------------------------------------

    def _exchange(self, signature: tuple[Any, ...], name: str, payload: Any) -> list[Any]:
        return self._enter(signature, name, payload)()

    def _enter(self, signature: tuple[Any, ...], name: str, payload: Any) -> Callable[[], list[Any]]:
        """Bring something to a collective; return what waits for that of all."""
        with self.job.condition:
            ring = self._present()
            self._where = f"{signature[0]} '{name}'"
            self.visits += 1
            cut, end = self._let_faults_happen(name)
            if ring.broken:
                raise HorovodInternalError(f"{name}: a rank was lost")
            slot = ring.slots.setdefault(self._position, _Slot((*signature, name)))
            if slot.signature != (*signature, name):
                self.job.fail(
                    f"rank {self.rank()} is in {(*signature, name)}, others are in {slot.signature}"
                )
            self._position += 1
            slot.entries[self._place_in_ring] = payload
            self.job.condition.notify_all()
            self._where = "its own code"
        return lambda: self._await(ring, slot, name, cut=cut, end=end)

    def _await(self, ring: _Ring, slot: _Slot, name: str, *, cut: bool, end: Fault | None) -> list[Any]:
        with self.job.condition:
            self._where = f"{slot.signature[0]} '{name}'"
            self._wait(lambda: len(slot.entries) == len(ring.members) or ring.broken or self._deserted(ring))
            if len(slot.entries) < len(ring.members):
                raise HorovodInternalError(f"{name}: a rank was lost")
            if end is not None:
                self.job.kill(self, end.replacement)
            if cut:
                self._break_ring()
                raise HorovodInternalError(f"{name}: cut off")
            self._where = "its own code"
            return [slot.entries[rank] for rank in range(len(ring.members))]

    def _let_faults_happen(self, name: str) -> tuple[bool, Fault | None]:
        """Let faults happen; return whether to be cut off, and the fault that kills after the collective."""
        self.check_alive()
        cut, end = False, None
        for fault in self.job.faults:
            if not fault.visit(self._place_in_ring, name):
                continue
            if fault.action == "kill":
                self.job.kill(self, fault.replacement)
            elif fault.action == "kill_all":
                self.job.kill_all(self)
            elif fault.action == "kill_after":
                end = fault
            elif fault.action == "cut":
                cut = True
            else:
                self.job.change(self._present().members, fault)
        return cut, end

    def _present(self) -> _Ring:
        if self._ring is None:
            raise RuntimeError("not initialised: init() has not been called")
        return self._ring

    def _deserted(self, ring: _Ring) -> bool:
        gone = [str(rank) for rank, member in enumerate(ring.members) if member.status == "returned"]
        if gone:
            self.job.fail(
                f"rank {self._place_in_ring} is in {self._where}; rank {', '.join(gone)} has returned"
            )
        return False

    def _wait(self, until: Callable[[], bool]) -> None:
        done = self.job.condition.wait_for(
            lambda: until() or self._doomed or self.job.failure is not None, HANG_SECONDS
        )
        if not done:
            faulthandler.dump_traceback()  # where the threads are that it waits for, such as a writer
            self.job.fail("the job hangs")
        self.check_alive()
        if self.job.failure is not None:
            raise AssertionError(self.job.failure)

    def _break_ring(self) -> None:
        if self._ring is not None:
            self._ring.broken = True
            self.job.condition.notify_all()

    def _end(self, status: Status) -> None:
        with self.job.condition:
            self.status = status
            self._where = "the past"
            if status != "returned":
                self._break_ring()
            self.job.rendezvous()
            self.job.condition.notify_all()

    def describe(self) -> str:
        """Return who and where it is, for messages."""
        return f"rank {self._place_in_ring} (place {self.place:g}, {self.status}) is in {self._where}"


class FakeJob:
    """The ranks of one job, which run ``main`` and call ``world.init()``, and their driver."""

    def __init__(self, main: Callable[[FakeWorld], Any], size: int, faults: Sequence[Fault] = ()) -> None:
        self.condition = threading.Condition(threading.RLock())
        self.faults = list(faults)
        self.failure: str | None = None  # why the test fails: ranks do not fit together, or hang
        self._main = main
        self._members: list[FakeWorld] = []
        self._outcomes: list[Outcome] = []
        self._threads: list[threading.Thread] = []
        for place in range(size):
            self._members.append(FakeWorld(self, place, newcomer=False))

    def run(self) -> list[Outcome]:
        """Run to the end; return how the ranks ended: those that returned first, by rank, then the others."""
        for member in list(self._members):
            self._start(member)
        for thread in self._threads:  # grows while we wait
            thread.join(HANG_SECONDS * 2)
        if self.failure is not None:
            raise AssertionError(self.failure)
        alive = [member.describe() for member in self._members if member.status == "runs"]
        assert not alive, f"still running: {alive}"
        idle = [fault for fault in self.faults if not fault.fired]
        assert not idle, f"never happened: {idle}"
        return sorted(self._outcomes, key=lambda outcome: (outcome.status != "returned", outcome.world.place))

    def results(self) -> list[Any]:
        """Run to the end, and return what the ranks returned, by rank. An error of any rank is raised."""
        outcomes = self.run()
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.result for outcome in outcomes if outcome.status == "returned"]

    # -- called by the ranks, which hold the condition -------------------------------------------------------

    def rendezvous(self) -> None:
        """Connect the ranks if all that are there are waiting for it."""
        there = [member for member in self._members if member.status == "runs" and not member._leaving]
        if self.failure is not None or any(member._ring is not None for member in there):
            return
        if not there or any(member._where != "init()" for member in there):
            return
        ring = _Ring(sorted(there, key=lambda member: member.place))
        for rank, member in enumerate(ring.members):
            member._ring, member._place_in_ring, member._position = ring, rank, 0
            member._where = "its own code"
            member.rendezvouses += 1
        self.condition.notify_all()

    def kill(self, member: FakeWorld, replacement: Replacement) -> None:
        """End a rank, and start a process in its stead."""
        member._doomed = True
        if replacement == "in_place":
            self._join(member.place)
        member._end("killed")
        raise Killed

    def kill_all(self, member: FakeWorld) -> None:
        """End all ranks, wherever they are."""
        for other in self._members:
            other._doomed = other._doomed or other.status == "runs"
        member._end("killed")
        raise Killed

    def change(self, ring: Sequence[FakeWorld], fault: Fault) -> None:
        """Add and remove ranks, and tell those that are there."""
        for rank in fault.remove:
            ring[rank]._leaving = True
        for _ in range(fault.add):
            self._join(min(member.place for member in ring) - 1 if fault.ahead else self._next_place())
        for member in ring:
            for tell in member.told:
                tell(0.0, 1 if fault.remove else 2)

    def fail(self, reason: str) -> None:
        """Give the test up."""
        if self.failure is None:
            self.failure = "; ".join([reason, *(member.describe() for member in self._members)])
        self.condition.notify_all()
        raise AssertionError(self.failure)

    def _next_place(self) -> float:
        return max(member.place for member in self._members) + 1

    def _join(self, place: float) -> None:
        member = FakeWorld(self, place, newcomer=True)
        self._members.append(member)
        self._start(member)

    def _start(self, member: FakeWorld) -> None:
        thread = threading.Thread(
            target=self._live, args=(member,), name=f"place-{member.place:g}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _live(self, member: FakeWorld) -> None:
        _current.world = member
        outcome = Outcome(member, "returned")
        try:
            outcome.result = self._main(member)
        except Killed:
            outcome.status = "killed"
        except (Preempted, RemovedError):
            outcome.status = "left"
        except BaseException as error:
            outcome.status, outcome.error = "failed", error
        self._outcomes.append(outcome)
        member._end(outcome.status)


def leave() -> None:
    """Let the test itself be a process of no fake job any more."""
    _current.__dict__.pop("world", None)


def alone(*faults: Fault) -> FakeWorld:
    """The world of a job of one rank, whose process is the test itself. Not initialised yet."""
    job = FakeJob(lambda world: None, 1, faults)
    _current.world = job._members[0]
    return job._members[0]


def current_world() -> FakeWorld | None:
    """The rank that the calling thread is."""
    return getattr(_current, "world", None)
