"""Rollbacks in which no rank was lost: which rank kept the others waiting, and how often they happen.

If a rank is busy for long without a sign of progress, the other ranks stop waiting, and all roll back. No
process has died, so no guardian counts such rollbacks. This module makes the ranks wait longer the next time,
and ends the job if it makes no progress between rollbacks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType

from hvdrecover import heartbeat
from hvdrecover.clock import Clock
from hvdrecover.errors import NoProgressError
from hvdrecover.events import Events
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.state import liveness
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.uncaught import place

logger = logging.getLogger(__name__)

LIMIT = 3  # rollbacks in a row without progress after which the ranks give up
ATTEMPTS = 10  # faults in a row after which a rank gives up that could not compare with the others
LATE = 1000  # ms after the first rank within which all waiting ranks learn of a fault

_SHOWN = 3  # ranks or tensors that a message lists


@dataclass(frozen=True, order=True)
class Tally:
    """The farthest point that a job has reached, and how often it has rolled back since.

    Attributes:
        changes: commits at which something had changed, up to the farthest point. A commit without a change
            is no progress: a script may commit whenever it is called again.
        steps: steps from there to that point.
        returns: rollbacks since then, without a lost rank and without progress.
    """

    changes: int = -1
    steps: int = 0
    returns: int = 0


@dataclass(frozen=True)
class Account:
    """One rank's knowledge of the faults since the ranks agreed last; all integers, as they are sent.

    Attributes:
        faults: number of faults; 0 in a process that has just started.
        reached: `Tally.changes` at the farthest point since then.
        done: `Tally.steps` at that point.
        size: how many ranks there were.
        age: time from its first fault to the end of the rendezvous, in ms.
        silent: time without progress at its first fault, in ms; 0 where no progress is expected.
        limit: seconds for which ranks wait for a silent one; 0 if unknown.
        apart: 1 if it knows that each rank waited in a collective that another rank had not called.
    """

    changes: int = -1
    steps: int = 0
    returns: int = 0
    faults: int = 0
    reached: int = 0
    done: int = 0
    size: int = 0
    age: int = 0
    silent: int = 0
    limit: int = 0
    apart: int = 0


def all_there(accounts: Sequence[Account]) -> bool:
    """Return whether the rendezvous has the same ranks as before the fault."""
    return all(each.faults and each.size == len(accounts) for each in accounts)


def tally(accounts: Sequence[Account]) -> Tally:
    """Return the progress of the job, from the accounts of all ranks."""
    before = max(Tally(each.changes, each.steps, each.returns) for each in accounts)
    reached = max((Tally(each.reached, each.done) for each in accounts if each.faults), default=Tally())
    if reached > replace(before, returns=0):
        return reached
    # A process that replaces a lost one has seen fewer faults, and only later ones.
    returned = min(each.faults for each in accounts) if all_there(accounts) else 0
    return replace(before, returns=before.returns + returned)


def kept_waiting(accounts: Sequence[Account]) -> dict[int, float]:
    """Return the ranks that were silent while the others waited for them, and for how many seconds.

    Ranks that wait in a collective learn at the same time that it has failed. A busy rank learns it later:
    the last rank at least was busy. If a rank was lost, no rank is to blame. If each rank waited in a
    collective that another had not called, none was busy.
    """
    if not all_there(accounts) or any(each.apart for each in accounts):
        return {}
    limit, ages = wait_limit(accounts), [each.age for each in accounts]
    # Without a limit, a rank may have failed for another reason, and chance decides which rank was last.
    least = 1 if limit else LATE
    lateness = [max(ages) - age for age in ages]
    late = [rank for rank, ms in enumerate(lateness) if ms > LATE or ms == max(lateness) >= least]
    silences = {rank: accounts[rank].silent for rank in late}
    return {rank: silent / 1000 for rank, silent in silences.items() if silent > limit * 1000}


def waits_apart(missing: Mapping[int, Sequence[str]], size: int) -> str:
    """Return which rank waits in which collective, if each waits in one that another has not called; else ''.

    ``missing``: the tensors that wait for each rank, as Horovod reports them.
    """
    tensors = {name for names in missing.values() for name in names}
    waits: dict[tuple[str, ...], list[int]] = {}
    for rank in range(size):
        called = tuple(sorted(tensors.difference(missing.get(rank, ()))))
        if not called or len(called) == len(tensors):
            return ""  # the rank may be busy, or has called all collectives
        waits.setdefault(called, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {_few(ranks)} in {_few(names)}" for names, ranks in waits.items()
    )


def _few(things: Sequence[object]) -> str:
    more = f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
    return f"{', '.join(map(str, things[:_SHOWN]))}{more}"


def wait_limit(accounts: Sequence[Account]) -> int:
    """Return for how many seconds ranks waited for a silent one; 0 if unknown."""
    return min((each.limit for each in accounts if each.limit), default=0)


def silence(reading: Reading) -> float:
    """For how many seconds a rank has shown no progress; 0 where no progress is expected."""
    expected = reading.phase in (Phase.BEGINNING, Phase.TRAINING) and not (reading.paused or reading.waiting)
    return reading.silent if expected else 0.0


@dataclass(frozen=True)
class FaultNotice:
    """The moment at which this rank has learnt of a fault.

    Attributes:
        limit: seconds for which ranks wait for a silent one; 0: no limit.
        missing: the tensors that wait for each rank, if Horovod has reported that here.
    """

    time: float
    reading: Reading
    limit: int
    missing: Mapping[int, Sequence[str]] = field(default_factory=dict)


class Rollbacks:
    """One rank's account of rollbacks, for one training function."""

    def __init__(self, world: World, events: Events, clock: Clock) -> None:
        self._world = world
        self._events = events
        self._clock = clock
        self._tally = Tally()
        self._account = Account()
        self._first: FaultNotice | None = None
        self._commit = 0
        self._reason = self._place = self._waits = ""
        self._warned: set[str] = set()
        self._learnt = False

    @property
    def farthest(self) -> tuple[int, int]:
        """Return how far the job had come: commits at which the state had changed, and steps since."""
        return max(self._tally.changes, 0), self._tally.steps

    def notice(self) -> FaultNotice:
        """Return the present progress of this rank. Call it as soon as an error may be a fault."""
        return FaultNotice(self._clock.monotonic(), heartbeat.read(), liveness.allowed(), heartbeat.stalled())

    def note(self, notice: FaultNotice, changes: int, error: BaseException) -> None:
        """Note a fault: ranks seem to be lost; ``changes``: commits so far at which something had changed."""
        mine = self._account
        if self._first is None:  # later faults in a row are consequences of the first
            self._first, self._place = notice, place(error)
            silent = math.ceil(silence(notice.reading) * 1000)
            size = self._world.size()
            self._waits = waits_apart(notice.missing, size)
            apart = int(bool(self._waits))
            mine = replace(mine, size=size, silent=silent, limit=notice.limit, apart=apart)
        self._reason, self._commit = str(error), notice.reading.commit
        reached = max(Tally(mine.reached, mine.done), Tally(changes, notice.reading.steps))
        faults = mine.faults + 1
        self._account = replace(mine, faults=faults, reached=reached.changes, done=reached.steps)

    def rejoined(self) -> None:
        """Note the end of a rendezvous."""
        if self._account.faults >= ATTEMPTS:
            raise self._no_progress(self._account.faults)
        if self._first is not None:
            age = math.ceil((self._clock.monotonic() - self._first.time) * 1000)
            self._account = replace(self._account, age=age)

    def compare(self) -> None:
        """Compare accounts with the other ranks. All ranks call this after the rendezvous, before `agree`."""
        far = self._tally
        mine = replace(self._account, changes=far.changes, steps=far.steps, returns=far.returns)
        table = self._world.allgather(astuple(mine), "hvdrecover.rollbacks")
        accounts = [Account(*row) for row in table.tolist()]
        self._tally = tally(accounts)
        silent, limit = kept_waiting(accounts), wait_limit(accounts)
        apart = [rank for rank, each in enumerate(accounts) if each.apart]
        if self._tally.returns >= LIMIT:
            raise self._no_progress(self._tally.returns, silent, limit, apart)
        if self._waits and self._waits not in self._warned:
            self._warned.add(self._waits)
            logger.warning("the %s", _out_of_step(self._waits))
        if limit and self._world.rank() in silent and self._first is not None:
            self._learn(self._first, silent[self._world.rank()], limit)
        self._learnt = bool(limit and silent)
        self._account, self._first, self._waits = Account(), None, ""

    def agreed(self) -> None:
        """Apply the longer wait at once, now that all ranks know it."""
        if self._learnt:
            heartbeat.await_guardian()
            liveness.follow(self._world)

    def _learn(self, notice: FaultNotice, seconds: float, limit: int) -> None:
        """Make the other ranks wait longer the next time, as this rank was busy; log the remedy."""
        # After the rollback, the same work comes right after an agreement, which counts as a beginning.
        heartbeat.has_seen(seconds if notice.reading.phase == Phase.TRAINING else 0.0, seconds)
        message = None
        if self._place not in self._warned:
            self._warned.add(self._place)
            message = _warning(self._world.rank(), seconds, limit, self._place)
        facts = {"seconds": seconds, "limit": limit, "where": self._place}
        self._events.emit("kept_waiting", message, level=logging.WARNING, **facts)

    def _no_progress(
        self,
        rollbacks: int,
        silent: Mapping[int, float] = MappingProxyType({}),
        limit: int = 0,
        apart: Sequence[int] = (),
    ) -> NoProgressError:
        """Return the error of ranks that have rolled back again and again.

        All ranks call this if ranks were silent or apart, as it asks one of them for its place.
        """
        rank = None
        if apart:
            waits = gather_json(self._world, self._waits, "hvdrecover.waits")[apart[0]]
            cause = f"The {_out_of_step(waits)}."
        elif silent:
            rank = max(silent, key=silent.__getitem__)
            where = gather_json(self._world, self._place, "hvdrecover.places")[rank]
            before = f" before {where}" if where else ""
            longer = f", longer than the {limit} s that the others wait" if limit else ""
            cause = (
                f"Rank {rank} was busy for {silent[rank]:.0f} s{before}{longer}. Put what takes so long into "
                "`with recover.paused():`, on all ranks, or give a longer --hang-timeout."
            )
        else:
            cause = (
                f"The last collective failed with: {self._reason}\nIf all ranks call it alike, and the "
                "network is sound, look for a rank that is busy for too long, and put that into "
                "`with recover.paused():`, on all ranks."
            )
        head = (
            f"commit {self._commit}: the ranks have rolled back {rollbacks} times in a row without getting "
            f"farther than {self._tally.steps} steps beyond it, though none of them was lost"
        )
        return NoProgressError(f"{head}. {cause}", self._commit, rank)


def _warning(rank: int, seconds: float, limit: int, where: str) -> str:
    before = f" before {where}" if where else ""
    return (
        f"rank {rank} was busy for {seconds:.1f} s without a sign of progress{before}. The others wait for "
        f"{limit} s at most, so all have gone back to the last commit, and it is done again. Put what takes "
        "so long into `with recover.paused():`, on all ranks, or give a longer --hang-timeout"
    )


def _out_of_step(waits: str) -> str:
    """Return the message for ranks that wait for each other; it follows the word "the"."""
    return (
        f"ranks are out of step: each waits in a collective that another rank has not called ({waits}). "
        "Have all ranks call the same collectives, in the same order"
    )
