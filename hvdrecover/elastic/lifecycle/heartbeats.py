"""This rank's signs of life: what its guardian reads, and how long other ranks wait for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdrecover import heartbeat
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.elastic.companions import Moment, Observer, Table, Voter
from hvdrecover.elastic.interfaces import World
from hvdrecover.elastic.lifecycle import stalls


class Liveness(Observer):
    """Keeps this process's heartbeat, and the limit of collectives, where the commits are.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def captured(self, snapshot: Snapshot) -> None:
        """Count a commit as progress."""
        heartbeat.committed(snapshot.id.generation, snapshot.id.commit, snapshot.state["random"]["stream"])

    def committed(self) -> None:
        """Limit waiting as the heartbeat now says."""
        stalls.follow(self._world)

    def agreed(self, agreement: Agreement) -> None:
        """Resume training at a commit."""
        commit = agreement.snapshot.id
        heartbeat.stand_at(commit.generation, commit.commit, agreement.snapshot.state["random"]["stream"])
        heartbeat.resume()
        stalls.follow(self._world)


class Silences(Voter):
    """Has all ranks learn the longest silences of any, so that all judge hangs alike."""

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send the longest silences of this rank, in milliseconds."""
        if moment.kind != "rendezvous":
            return ()
        return [math.ceil(seconds * 1000) for seconds in heartbeat.longest()]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Take over the longest of all."""
        if moment.kind == "rendezvous":
            heartbeat.has_seen(*(table.max(axis=0) / 1000).tolist())
        return None
