"""The memory of one rank's commits, and the choice of arenas for the next commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.near_tier import NearTier
from hvdrecover.checkpoint.snapshot import Snapshot


class Arenas:
    """The arenas of the newest commit, and of one more.

    The next commit overwrites the newest one, unless that is being written. Then the next one goes to other
    memory, and the two take turns: memory that is new to the process costs more time than the copy. When the
    write ends, the memory of the older one is offered back to the system. So one state's size is used while
    nothing is in flight, and never more than two.

    The process that keeps its host's near tier has commits in that memory instead, whenever some is free.

    Attributes:
        near: the near tier, if this process keeps it.
    """

    def __init__(self) -> None:
        self._newest: Mapping[str, Arena] = {}
        self._spare: Mapping[str, Arena] = {}
        self._abandoned: list[Callable[[], Snapshot | None]] = []
        self.near: NearTier | None = None

    def acquire(self, in_flight: Snapshot | None, layouts: Mapping[str, Layout]) -> Mapping[str, Arena]:
        """Return arenas that the next commit may overwrite; empty if it needs new ones.

        Args:
            in_flight: the commit that is being written and must not change, if any.
            layouts: of the next commit's files, by attribute name.
        """
        pinned = self._pinned(in_flight)
        if self.near is not None and (near := self.near.acquire(layouts, pinned)) is not None:
            return near
        if _is_shared(self._newest):
            self._newest = {}
        if pinned.isdisjoint(self._newest.values()):
            return self._newest
        spare = self._spare
        self._newest, self._spare = {}, self._newest
        if not pinned.isdisjoint(spare.values()):
            return {}
        for arena in spare.values():
            arena.take_back()
        return spare

    def lacks(self, in_flight: Snapshot | None, layouts: Mapping[str, Layout]) -> int:
        """Return how many bytes of new private memory the next commit needs; 0 if the near tier has some.

        Args:
            in_flight: the commit that is being written, if any.
            layouts: of the next commit's files, by attribute name.
        """
        if self.near is not None and self.near.has_memory:
            return 0  # it has looked for room for all that it will ever take
        pinned = self._pinned(in_flight)
        usable = self._newest if pinned.isdisjoint(self._newest.values()) else self._spare
        if _is_shared(usable) or not pinned.isdisjoint(usable.values()):
            usable = {}
        return sum(
            layout.nbytes
            for name, layout in layouts.items()
            if (arena := usable.get(name)) is None or arena.layout != layout
        )

    def hold(self, newest: Mapping[str, Arena]) -> None:
        """Note the arenas of the newest commit."""
        self._newest = newest
        if _is_shared(newest):
            self._spare = {}

    def adopt(self, newest: Mapping[str, Arena]) -> None:
        """Note the arenas of a commit that has been loaded; the memory of those before is let go."""
        self._newest, self._spare = newest, {}

    def release(self, written: Snapshot) -> None:
        """Offer the memory of a commit back to the system, unless the newest one needs it.

        Called on the writer's thread, while the commit still counts as in flight: nobody fills it yet.
        """
        if not _is_shared(written.arenas) and set(written.arenas.values()).isdisjoint(self._newest.values()):
            for arena in written.arenas.values():
                arena.offer_back()

    def abandon(self, in_flight: Callable[[], Snapshot | None]) -> None:
        """Keep the memory that a writer which was given up may still be reading.

        Args:
            in_flight: returns the snapshot that it writes, if any.
        """
        self._abandoned.append(in_flight)

    def _pinned(self, in_flight: Snapshot | None) -> set[Arena]:
        self._abandoned = [each for each in self._abandoned if each() is not None]
        read = [in_flight, *(each() for each in self._abandoned)]
        return {arena for snapshot in read if snapshot is not None for arena in snapshot.arenas.values()}


def _is_shared(arenas: Mapping[str, Arena]) -> bool:
    """Return whether commits lie in the near tier, or did until its memory was given back."""
    return any(arena.shared for arena in arenas.values())
