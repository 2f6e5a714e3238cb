"""Changes of hosts, as Horovod's driver reports them while training runs."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from hvdrecover.config import Config
from hvdrecover.elastic.companions import Moment, Table, Voter
from hvdrecover.elastic.horovod import hosts_updated


class HostChanges(Voter):
    """The changes that one rank knows of. If any rank knows of one, all have a rendezvous.

    Args:
        config: the process's settings.
    """

    def __init__(self, config: Config) -> None:
        self._elastic = config.elastic
        self._reports: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._known = 0

    def note(self, update: int) -> None:
        """Take a report, on any thread: hosts have come (2) or gone (1)."""
        self._reports.put(update)

    def forget(self) -> None:
        """Forget all changes so far, as a rendezvous heeds them."""
        self._take()
        self._known = 0

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send all changes since the last rendezvous."""
        if moment.kind == "rendezvous":
            return ()
        self._take()
        return [self._known]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Return the interrupt that leads to a rendezvous, if there was a change."""
        return hosts_updated() if self._elastic and table.any() else None

    def _take(self) -> None:
        while not self._reports.empty():
            self._known |= self._reports.get()
