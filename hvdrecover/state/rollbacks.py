"""Rollbacks in which no rank was lost: which rank kept the others waiting, and how often they happen.

If a rank is busy for long without a sign of progress, the other ranks stop waiting, and all roll back.
They wait longer the next time, and give up if the job makes no progress between rollbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from hvdrecover import heartbeat
from hvdrecover.clock import Clock
from hvdrecover.errors import NoProgressError
from hvdrecover.events import Events
from hvdrecover.heartbeat import Reading
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.state.horovod import limit_waits
from hvdrecover.uncaught import place

# No process has died, so no guardian counts these rollbacks.
LIMIT = 3  # rollbacks in a row without progress after which the ranks give up
ATTEMPTS = 10  # faults in a row after which a rank gives up that could not compare with the others
LATE = 1000  # ms after the first rank within which all waiting ranks learn of a fault
_REMEDY = (
    "Put what takes so long into `with recover.paused():`, on all ranks, or give a longer --hang-timeout"
)


@dataclass(frozen=True)
class Account:
    """One rank's knowledge of the job's progress; all integers, as they are sent."""

    # Commits at which something had changed, up to the farthest point of the job. A commit without a change
    # is no progress: a script may commit whenever it is called again.
    changes: int = -1
    steps: int = 0  # from there to that point
    returns: int = 0  # rollbacks since then, without a lost rank and without progress
    size: int = 0  # how many ranks there were at the last fault; 0 in a process that has just started
    reached: int = 0  # commits at which something had changed when the last fault came
    done: int = 0  # steps since then
    age: int = 0  # time from the fault to the end of the rendezvous, in ms
    silent: int = 0  # time without progress at the fault, in ms; 0 if that was shorter than ranks wait


def all_there(accounts: Sequence[Account]) -> bool:
    """Return whether the rendezvous has the same ranks as before the fault."""
    return all(each.size == len(accounts) for each in accounts)


def tally(accounts: Sequence[Account]) -> Account:
    changes, steps, returns = max((each.changes, each.steps, each.returns) for each in accounts)
    reached = max(((each.reached, each.done) for each in accounts if each.size), default=(-1, 0))
    if reached > (changes, steps):
        return Account(*reached)
    return Account(changes, steps, returns + all_there(accounts))


def kept_waiting(accounts: Sequence[Account]) -> dict[int, float]:
    """Return the ranks that were busy while the others waited for them, and for how many seconds."""
    if not all_there(accounts):
        return {}  # a rank was lost, so no rank is to blame
    # Ranks that wait in a collective learn together that it has failed. A busy rank learns it later.
    first = max(each.age for each in accounts)
    return {
        rank: each.silent / 1000
        for rank, each in enumerate(accounts)
        if each.silent and first - each.age > LATE
    }


class Rollbacks:
    """One rank's account of rollbacks, for one training function."""

    def __init__(self, world: World, events: Events, clock: Clock) -> None:
        self._world = world
        self._events = events
        self._clock = clock
        self._account = Account()
        self._first: tuple[float, int] | None = None  # the first fault's time and limit of waits
        self._faults = self._commit = 0
        self._reason = self._place = ""
        self._warned: set[str] = set()
        self._learnt = False

    def note(self, reading: Reading, limit: int, error: BaseException) -> None:
        """Note a fault: ranks seem to be lost. Ranks wait ``limit`` seconds for a silent one; 0: no limit."""
        mine = self._account
        self._faults += 1
        self._reason, self._commit = str(error), reading.commit
        if self._first is None:  # later faults in a row are consequences of the first
            self._first, self._place = (self._clock.monotonic(), limit), place(error)
            if 0 < limit < reading.silent:
                mine = replace(mine, silent=int(reading.silent * 1000))
        reached, done = max((mine.reached, mine.done), reading.point)
        self._account = replace(mine, size=self._world.size(), reached=reached, done=done)

    def rejoined(self) -> None:
        if self._faults >= ATTEMPTS:
            raise self._no_progress(self._faults, None, "")
        if self._first is not None:
            age = int((self._clock.monotonic() - self._first[0]) * 1000)
            self._account = replace(self._account, age=age)

    def compare(self) -> None:
        """Compare accounts with the other ranks. All ranks call this after the rendezvous, before `agree`."""
        table = self._world.allgather(astuple(self._account), "hvdrecover.rollbacks")
        accounts = [Account(*row) for row in table.tolist()]
        self._account, silent = tally(accounts), kept_waiting(accounts)
        slowest = max(silent, key=silent.__getitem__, default=None)
        if self._account.returns >= LIMIT:
            places = gather_json(self._world, self._place, "hvdrecover.places")
            busy = "" if slowest is None else _busy(slowest, silent[slowest], places[slowest])
            raise self._no_progress(self._account.returns, slowest, busy)
        if self._first is not None and (mine := silent.get(self._world.rank())):
            self._learn(mine, self._first[1])
        self._learnt = bool(silent)
        self._first, self._faults = None, 0

    def agreed(self) -> None:
        """Apply the longer wait at once, now that all ranks know it."""
        if self._learnt:
            heartbeat.await_guardian()
            limit_waits(self._world)

    def _learn(self, seconds: float, limit: int) -> None:
        """Make the other ranks wait longer the next time, as this rank was busy; log the remedy."""
        heartbeat.page.has_seen(seconds)
        message = None
        if self._place not in self._warned:
            self._warned.add(self._place)
            message = (
                f"{_busy(self._world.rank(), seconds, self._place)}. The others wait for {limit} s at most, "
                f"so all have gone back to the last commit, and it is done again. {_REMEDY}"
            )
        facts = {"seconds": seconds, "limit": limit, "where": self._place}
        self._events.emit("kept_waiting", message, level=logging.WARNING, **facts)

    def _no_progress(self, rollbacks: int, rank: int | None, busy: str) -> NoProgressError:
        cause = f"Of them, {busy}, longer than the others wait. {_REMEDY}."
        if rank is None:
            cause = (
                f"The last collective failed with: {self._reason}\nIf all ranks call it, in the same "
                "order, and the network is sound, look for a rank that is busy for too long, and put that "
                "into `with recover.paused():`, on all ranks."
            )
        head = (
            f"commit {self._commit}: the ranks have rolled back {rollbacks} times in a row without getting "
            f"farther than {self._account.steps} steps beyond it, though none of them was lost"
        )
        return NoProgressError(f"{head}. {cause}", self._commit, rank)


def _busy(rank: int, seconds: float, where: str) -> str:
    before = f" before {where}" if where else ""
    return f"rank {rank} was busy for {seconds:.1f} s without a sign of progress{before}"
