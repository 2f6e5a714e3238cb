"""The memory of one rank's commits, and who may overwrite it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.near.tier import NearTier
from hvdrecover.checkpoint.snapshot import Snapshot


class Arenas:
    """The arenas of the newest commit, and of one more.

    The newest commit is overwritten by the next one, unless it is being written. Then the next one goes to
    other memory, and the two are used by turns: memory that is new to the process costs more time than
    copying into it. When the write ends, the memory of the older one is offered back to the system, so while
    nothing is in flight, one state's size is used, and never more than two.

    The process that keeps its host's near tier has commits in that memory instead, whenever there is some.
    Another one may have borrowed a commit from there; its next one goes to memory of its own.

    Attributes:
        near: the near tier, if this process keeps it.
    """

    def __init__(self) -> None:
        self._newest: Mapping[str, Arena] = {}
        self._spare: Mapping[str, Arena] = {}
        self._abandoned: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.near: NearTier | None = None

    def acquire(self, in_flight: Snapshot | None, layouts: Mapping[str, Layout]) -> Mapping[str, Arena]:
        """Return arenas that the next commit may overwrite; empty if it needs new ones.

        Args:
            in_flight: the commit that is being written and must not change, if any.
            layouts: of the next commit's files, by attribute name.
        """
        pinned = self._pinned(in_flight)
        near = None if self.near is None else self.near.acquire(layouts, pinned)
        return self._acquire_private(pinned) if near is None else near

    def lacks(self, in_flight: Snapshot | None, layouts: Mapping[str, Layout]) -> int:
        """Return how many bytes of new private memory the next commit needs; 0 if the near tier has some.

        Args:
            in_flight: the commit that is being written, if any.
            layouts: of the next commit's files, by attribute name.
        """
        if self.near is not None and self.near.has_memory:
            return 0  # it has looked for room for all that it will ever take
        usable = {} if any(arena.borrowed for arena in self._newest.values()) else self._newest
        if not self._pinned(in_flight).isdisjoint(usable.values()):
            usable = self._spare if self._abandoned.isdisjoint(self._spare.values()) else {}
        return sum(
            layout.nbytes
            for name, layout in layouts.items()
            if (arena := usable.get(name)) is None or arena.layout != layout
        )

    def _pinned(self, in_flight: Snapshot | None) -> weakref.WeakSet[Arena]:
        return self._abandoned.union(in_flight.arenas.values() if in_flight is not None else ())

    def _acquire_private(self, pinned: weakref.WeakSet[Arena]) -> Mapping[str, Arena]:
        newest = self._newest
        if self._is_near(newest) or any(arena.borrowed for arena in newest.values()):
            self._newest = {}
            return {}
        if pinned.isdisjoint(newest.values()):
            return newest
        self._newest, self._spare, room = {}, newest, self._spare
        if not self._abandoned.isdisjoint(room.values()):
            return {}
        for arena in room.values():
            arena.take_back()
        return room

    def hold(self, newest: Mapping[str, Arena]) -> None:
        """Note the arenas of the newest commit."""
        self._newest = newest
        if self._is_near(newest):
            self._spare = {}

    def adopt(self, newest: Mapping[str, Arena]) -> None:
        """Note the arenas of a commit that has been loaded; the memory of those before is let go."""
        self._newest, self._spare = newest, {}

    def release(self, written: Snapshot) -> None:
        """Offer the memory of a commit back to the system, unless the newest one needs it.

        Called on the writer's thread, while the commit still counts as in flight: nobody fills it yet.
        """
        if set(written.arenas.values()).isdisjoint(self._newest.values()) and not self._is_near(
            written.arenas
        ):
            for arena in written.arenas.values():
                arena.offer_back()

    def abandon(self, snapshot: Snapshot) -> None:
        """Never overwrite a snapshot: a writer that was given up may still be reading it."""
        self._abandoned.update(snapshot.arenas.values())
        if self.near is not None:
            self.near.give_up(snapshot.arenas)

    def _is_near(self, arenas: Mapping[str, Arena]) -> bool:
        return self.near is not None and self.near.owns(arenas)
