"""Companions: what takes part in a rank's commits and recoveries, and is not the trunk.

The trunk is the state's attributes, the commits in memory and on storage, the random streams, and the
election. It knows no companion by name. A companion is of one of three kinds, or of several: an `Observer`
looks on, a `Kept` is a part of each commit, a `Voter` has a say in what all ranks do next.
`hvdrecover.elastic.assembly` lists them in their order, which is the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.agreement.election import Election
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.elastic.commits.memory import Memory
from hvdrecover.elastic.interfaces import World
from hvdrecover.errors import HvdrecoverError

logger = logging.getLogger(__name__)

Table = npt.NDArray[np.int64]
"""The numbers of all ranks; of shape ``[size, n]``."""


@dataclass(frozen=True)
class Moment:
    """The occasion on which the ranks exchange their numbers.

    Attributes:
        kind: a ``commit``, a ``check`` for changes between commits, or a ``rendezvous``.
        held: at a rendezvous, the newest commit in this rank's memory.
        elected: at a rendezvous, its outcome; None until all have sent their numbers.
        returned: whether the training function has returned, so that no step is under way.
    """

    kind: Literal["commit", "check", "rendezvous"]
    held: Snapshot | None = None
    elected: Election | None = None
    returned: bool = False


class Observer:
    """Looks on, and changes nothing.

    If a method raises an exception, that is reported once, the observer is dropped, and training continues.
    """

    def attach(self) -> None:
        """Ask the framework for reports of steps; called once, when the state is made. Errors are raised."""

    def observed(self, values: Mapping[str, Any]) -> None:
        """Take numbers of a step that the script reports, by name."""

    def begins(self) -> None:
        """A commit begins."""

    def captured(self, snapshot: Snapshot) -> None:
        """A commit has been copied into this rank's memory."""

    def committed(self) -> None:
        """The commit has ended on all ranks, or was passed over by this one; training continues."""

    def agreed(self, agreement: Agreement) -> None:
        """The ranks have agreed on the state that they resume from."""

    def rolled_back(self) -> None:
        """The attributes are those of the last commit again."""

    def closing(self) -> None:
        """The training function has returned."""

    def leaving(self) -> None:
        """This process trains no more, though the run is not finished: it leaves, or an error ends it."""


class Kept:
    """A part of each commit that is not an attribute of the user's.

    Attributes:
        key: its name in a commit's JSON part.
    """

    key: str

    def capture(self) -> Json | None:
        """Return the part as it is now; None leaves it out."""
        raise NotImplementedError

    def load(self, value: Json | None) -> None:
        """Take the part out of a commit; None if the commit has none. Values may be nonsense."""
        raise NotImplementedError

    def resumed(self, value: Json | None) -> Json | None:
        """Return the part's new value when a job starts from a durable commit; on the elected rank only."""
        return value


class Voter:
    """Takes part in what the ranks decide together. All ranks have the same voters in the same order."""

    def attach(self) -> None:
        """Ask the framework for what this needs to know; called once, when the state is made."""

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        """Return the reason why what this rank holds now is not a commit, or must not become durable.

        Args:
            committing: whether all ranks are at a commit, which this one passes over if there is a reason. If
                not, the commit stays in memory, and the reason is raised when it is to become durable.
        """
        return None

    def inspect(self, memory: Memory) -> bool:
        """Look at a commit of all ranks; return whether this rank's tensors were replaced in it."""
        return False

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Return the numbers that this rank sends: as many as all others, and at a check as at a commit."""
        return ()

    def prefer(self, holders: Sequence[int], table: Table) -> Sequence[int]:
        """Return which ranks may be elected, of those that hold the newest commit; at least one."""
        return holders

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Return an error for all ranks to raise, by the numbers of all; None if there is none."""
        return None

    def resuming(self, stored: Snapshot, where: str) -> None:
        """A durable commit is about to be loaded on the elected rank. May raise an error."""


@dataclass
class Companions:
    """The companions of one rank, in their order.

    Attributes:
        observers: those that look on.
        kept: those that are part of each commit.
        voters: those that take part in decisions; of several verdicts the first one counts.
    """

    observers: tuple[Observer, ...] = ()
    kept: tuple[Kept, ...] = ()
    voters: tuple[Voter, ...] = ()

    def __add__(self, other: Companions) -> Companions:
        observers, kept = (*self.observers, *other.observers), (*self.kept, *other.kept)
        return Companions(observers, kept, (*self.voters, *other.voters))

    def attach(self) -> None:
        """Let each ask the framework for what it needs; voters last, as they may end a step."""
        for observer in self.observers:
            if not isinstance(observer, Voter):
                observer.attach()
        for voter in self.voters:
            voter.attach()

    def notify(self, method: Callable[..., None], *facts: Any) -> None:
        """Call a method of all observers; one that fails is dropped.

        Args:
            method: of `Observer`.
            facts: its arguments.
        """
        for observer in self.observers:
            try:
                getattr(observer, method.__name__)(*facts)
            except Exception as error:
                self.observers = tuple(each for each in self.observers if each is not observer)
                logger.warning("%s fails and is left out from now on: %r", type(observer).__name__, error)

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        """Return the first reason against a commit; all voters are asked."""
        found = [each.objection(committing=committing) for each in self.voters]
        return next((each for each in found if each is not None), None)

    def inspect(self, memory: Memory) -> bool:
        """Have all voters look at a commit; return whether tensors of this rank were replaced in it."""
        return bool([each for each in self.voters if each.inspect(memory)])  # all of them look

    def send(self, world: World, moment: Moment, own: Sequence[int] = ()) -> Callable[[], list[Table]]:
        """Send the numbers of all voters in one allgather.

        Args:
            world: the ranks, all of which call this.
            moment: the occasion.
            own: the trunk's numbers.

        Returns:
            A function that waits for all ranks' numbers. It returns the trunk's table and each voter's.
        """
        rows = [list(own), *(list(each.numbers(moment)) for each in self.voters)]
        name = "election" if moment.kind == "rendezvous" else "updates"
        sent = world.send([number for row in rows for number in row], f"hvdrecover.{name}")

        def hear() -> list[Table]:
            table, ends = sent(), accumulate(map(len, rows))
            return [table[:, end - len(row) : end] for row, end in zip(rows, ends, strict=True)]

        return hear

    def exchange(self, world: World, moment: Moment, own: Sequence[int] = ()) -> list[Table]:
        """Do as `send`, and wait for the numbers of all."""
        return self.send(world, moment, own)()

    def prefer(self, holders: Sequence[int], tables: Sequence[Table]) -> Sequence[int]:
        """Return those of the ranks with the newest commit that all voters prefer, as far as they agree."""
        for voter, table in zip(self.voters, tables, strict=True):
            holders = voter.prefer(holders, table)
        return holders

    def verdict(self, moment: Moment, tables: Sequence[Table]) -> BaseException | None:
        """Return the first verdict; all voters are asked, as some exchange more on the way."""
        found = [voter.verdict(moment, table) for voter, table in zip(self.voters, tables, strict=True)]
        return next((each for each in found if each is not None), None)

    def resuming(self, stored: Snapshot, where: str) -> None:
        """Have all voters look at a durable commit that is about to be loaded."""
        for each in self.voters:
            each.resuming(stored, where)
