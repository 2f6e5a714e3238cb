"""The end of a rank's part in a job: it leaves, or the run is finished."""

from __future__ import annotations

from typing import Any, NoReturn

from hvdrecover import heartbeat
from hvdrecover.checkpoint.retrying import ATTEMPTS
from hvdrecover.elastic.agreement import reports
from hvdrecover.elastic.assembly import Rank
from hvdrecover.elastic.durable.durability import FINISH_ATTEMPTS
from hvdrecover.elastic.horovod import hosts_updated
from hvdrecover.elastic.lifecycle import leaving
from hvdrecover.elastic.lifecycle.leaving import Departure


class Ends:
    """One rank's ways to end.

    Args:
        rank: the parts of this rank's state.
    """

    def __init__(self, rank: Rank) -> None:
        self._context = rank.context
        self._memory = rank.memory
        self._durable = rank.durable

    def leave(self, departure: Departure) -> NoReturn:
        """Leave at a commit that all ranks have made, or have a rendezvous of those that stay.

        Raises:
            Preempted: this rank leaves; if all do, the commit is durable.
            HostsUpdatedInterrupt: others leave.
        """
        world, commit, whole = self._context.world, self._memory.last, departure.whole
        world.allgather([commit.commit], "hvdrecover.leave")  # all have it before one that holds it is gone
        if not departure.leaving[world.rank()]:
            raise hosts_updated()
        if whole and self._durable.wanted:
            self._durable.make_durable(ATTEMPTS)
        if not whole:
            self._durable.near.remove()  # the others have the commit, and continue
        scope = "job" if whole else "host"
        heartbeat.notify(left=scope)
        heartbeat.enter(heartbeat.Phase.LEFT)
        message = reports.leaving(commit, self._durable.root, whole=whole)
        facts: dict[str, Any] = {"scope": scope, "generation": commit.generation, "commit": commit.commit}
        self._context.events.emit("leave", message if not whole or world.rank() == 0 else None, **facts)
        raise leaving.Preempted()

    def finish(self) -> None:
        """Make the newest commit the run's last, and durable on all ranks; see `State.finish`."""
        self._memory.mark(finished=True)
        self._durable.make_durable(FINISH_ATTEMPTS)
        self._durable.settle()
        self._say_finished(reports.finished(self._memory.last, self._durable.root))

    def reopen(self) -> None:
        """A training function is called on a state that an earlier one of this process has finished."""
        self._memory.mark(finished=False)

    def say_finished(self) -> None:
        """Report that there is nothing left to do."""
        self._durable.near.remove()
        self._say_finished(reports.finished_before(self._memory.last))

    def _say_finished(self, message: str) -> None:
        commit = self._memory.last
        self._context.announce("finished", message, generation=commit.generation, commit=commit.commit)
