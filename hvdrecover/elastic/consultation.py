"""What the ranks tell each other between two commits, so that all of them do the same next."""

from __future__ import annotations

import queue
import zlib
from dataclasses import dataclass

from hvdrecover import heartbeat
from hvdrecover.config import Config
from hvdrecover.elastic import stopping
from hvdrecover.elastic.interfaces import World
from hvdrecover.elastic.stopping import Decision


@dataclass(frozen=True)
class Outcome:
    """What all ranks know afterwards.

    Attributes:
        failed: `errors.number` of an error that ends the job, which a rank has met; 0 if none has.
        leaving: who leaves after a preemption.
        hosts_updated: whether hosts have come or gone.
        not_finite: whether a rank has parameters that are not finite.
        alike: whether the same gradients were missing on all ranks.
        busy: how long each rank has worked since the last commit, in microseconds; 0 if unknown.
    """

    failed: int
    leaving: Decision
    hosts_updated: bool
    not_finite: bool
    alike: bool
    busy: list[int]


class Consultation:
    """This rank's side of it.

    Args:
        config: the process's settings.
    """

    def __init__(self, config: Config) -> None:
        self._elastic = config.elastic
        self._host = zlib.crc32(config.host.encode())
        self._messages: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note_hosts(self, update: int) -> None:
        """Take down what Horovod's driver tells of hosts, on any thread: they have come (2) or gone (1)."""
        self._messages.put(update)

    def take_hosts(self) -> int:
        """What has been told of hosts since the last time; 0 if nothing."""
        updates = 0
        while not self._messages.empty():
            updates |= self._messages.get()
        return updates

    def hold(self, world: World, *, failed: int, not_finite: bool, missing: int, busy: int) -> Outcome:
        """Tell the others what this rank knows, and learn what they do: one allgather of seven numbers.

        Args:
            world: the ranks, all of whom must call this.
            failed: `errors.number` of an error that this rank has met, and that ends the job.
            not_finite: whether its parameters are not finite.
            missing: digest of the gradients that it has lacked.
            busy: how long it has worked since the last commit, in microseconds; 0 if unknown.
        """
        mine = [self.take_hosts(), failed, heartbeat.stop_asked(), self._host, not_finite, missing, busy]
        table = world.allgather(mine, "hvdrecover.updates").T.tolist()
        updates, failures, asked, hosts, numbers, lacked, worked = table
        leaving = stopping.decide(asked, hosts, elastic=self._elastic)
        return Outcome(
            failed=max(failures),
            leaving=leaving,
            hosts_updated=self._elastic and any(updates),
            not_finite=any(numbers),
            alike=len(set(lacked)) == 1,
            busy=worked,
        )
