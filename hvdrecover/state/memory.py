"""The newest commit in one rank's memory: make it, load it, return to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hvdrecover import machine
from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Arena, Layout
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.near_tier import NearTier
from hvdrecover.errors import ConfigError, HvdrecoverError, StateError
from hvdrecover.machine import Available
from hvdrecover.state.contents import Contents, Present, Strict
from hvdrecover.state.rank_local import Place, RankLocalState

logger = logging.getLogger(__name__)

_SEAL_SECONDS = 1.0  # how long a recovery waits for a seal; sending a gigabyte instead may take longer


class Memory:
    def __init__(
        self,
        contents: Contents,
        own: RankLocalState,
        place: Place,
        versions: dict[str, str],
        dataset: dict[str, Any] | None = None,
    ) -> None:
        self._contents = contents
        self._own = own
        self._place = place
        self._versions = versions
        self._dataset = dataset
        self._positions = contents.positions()  # positions of the samplers at the newest commit
        self.kept: Sequence[Any] = ()  # the hooks that keep JSON in each commit
        self.arenas = Arenas()
        self.newest: Snapshot | None = None  # None if making the last commit was interrupted
        self.attempt = CommitId(0, 0)  # the commit that was last begun, whether or not it was completed
        self.objection: HvdrecoverError | None = None  # why the newest commit must not become durable
        # Returns the snapshot that is being written and must not change, if any.
        self.in_flight: Callable[[], Snapshot | None] = lambda: None
        # Waits until that snapshot is written, or its write is given up.
        self.vacate: Callable[[], None] = lambda: None
        self.room: Callable[[], Available | None] = machine.memory_left
        self._has_waited = False

    # -- commits ---------------------------------------------------------------------------------------

    @property
    def last(self) -> CommitId:
        """The newest commit; generation 0 before the first agreement."""
        return self.newest.id if self.newest is not None else CommitId(0, 0)

    @property
    def finished(self) -> bool:
        return self.newest is not None and self.newest.finished

    def commit(self) -> Snapshot:
        """Make the next commit of the present state, and start the random streams that belong to it."""
        # Count from the last attempt: the other ranks count a commit even if it was interrupted here.
        commit = CommitId(self.attempt.generation, self.attempt.commit + 1)
        present = self._contents.take_apart(self._own.capture())
        unchanged = self._is_unchanged(present)
        # A script that commits before it trains does so again when it is resumed, and must keep its stream.
        self._own.stream += not unchanged
        snapshot = self.capture(commit, present, unchanged=unchanged)
        if self._place.joined and not self._own.stores_streams:
            self._own.resume_streams(snapshot)
        return snapshot

    def pass_over(self) -> None:
        """Count a commit that this rank skips; the others may make it."""
        self.attempt = CommitId(self.attempt.generation, self.attempt.commit + 1)

    def capture(
        self,
        commit: CommitId,
        present: Present | None = None,
        *,
        finished: bool = False,
        unchanged: bool = False,  # the newest commit has the same tensors, so none has to be copied
    ) -> Snapshot:
        """Copy the present state, or ``present``, under a commit's identity."""
        present = present or self._contents.take_apart(self._own.capture())
        self.attempt, self.objection = commit, None
        if unchanged and self.newest is not None and self.newest.layouts == present.layouts:
            arenas, digests = dict(self.newest.arenas), self.newest.digests
        else:
            arenas, digests = self._acquire(present.layouts), None
            self.newest = None  # if the copy is interrupted, memory holds no commit
            self._contents.copier.copy(present.parts, arenas)
            self.arenas.hold(arenas)
        random = {"seed": self._own.seed, "stream": self._own.stream, "states": present.streams}
        state = {**present.state, "random": random}
        state.update({each.key: value for each in self.kept if (value := each.capture()) is not None})
        self.newest = Snapshot(
            commit, arenas, state, self._place.size, self._versions, finished, self._dataset, digests
        )
        self._positions = self._contents.positions()
        return self.newest

    def adopt(self, snapshot: Snapshot) -> None:
        """Make a loaded commit the newest one, and free the memory of earlier commits."""
        self.arenas.hold(snapshot.arenas, alone=True)
        self.newest = replace(snapshot, dataset=self._dataset)
        self.attempt, self.objection = snapshot.id, None

    def stay(self) -> None:
        """Capture the initial state again, if `load` freed it for a commit that then failed to load."""
        if self.newest is None and self.attempt.generation == 0:
            with suppress(StateError):  # no memory for it: the caller reports the first error
                self.capture(CommitId(0, 0))

    def separate(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy of the newest commit for changes; until they are complete, `newest` is None."""
        arenas = self._acquire(snapshot.layouts)
        self.newest = None
        for name, arena in snapshot.arenas.items():
            if arenas[name] is not arena:
                arenas[name].buffer[:] = arena.buffer
        self.arenas.hold(arenas)
        return replace(snapshot, arenas=arenas, digests=None)

    def take_digests(self) -> None:
        """Get the digests of the newest commit, before the other ranks ask for them."""
        newest, near = self.newest, self.arenas.near
        if newest is None or not newest.id.generation:
            return
        if near is not None and newest.digests is None:
            # Once it is sealed, a process that takes a lost rank's place on this host finds it there.
            newest = replace(newest, digests=near.digests(newest, _SEAL_SECONDS))
        self.newest = newest.digested()

    def mark(self, *, finished: bool) -> None:
        if self.newest is not None and self.newest.finished != finished:
            self.newest = replace(self.newest, finished=finished)

    def load(self, snapshot: Snapshot, where: str, *, strict: Strict) -> list[str]:
        if snapshot is not self.newest and self.last.generation == 0:
            # Loading makes the optimizer's tensors. A new process first frees its copy of the initial state.
            self.arenas.hold({}, alone=True)
            self.newest = None
        if (virtual := snapshot.state.get("virtual")) and all(each.key != "virtual" for each in self.kept):
            raise ConfigError(
                "virtual_ranks",
                f"the commit has {virtual['size']}, and this state none. Their number is part of the result: "
                f"make the state with virtual_ranks={virtual['size']}, or name another root to start over",
            )
        differences = self._contents.load(snapshot.state, snapshot.arenas, where, strict=strict)
        for each in self.kept:
            each.load(snapshot.state.get(each.key))
        self._positions = self._contents.positions()
        if self._place.joined:
            self._contents.place(self._place.rank, self._place.size)
        return differences

    def resume(self, snapshot: Snapshot, *, load: bool = True) -> None:
        """Restore the random streams of a commit, and with ``load`` the rank-local values."""
        self._own.resume(snapshot, load=load)
        if self._place.joined:
            self._own.resume_streams(snapshot)
        self._positions = self._contents.positions()

    def is_short(self) -> bool:
        """Return whether a commit during the write of the newest one may have to wait for memory."""
        if self.newest is None or self.arenas.have_another(self.newest.layouts):
            return False
        left = self.room()
        return left is not None and left.nbytes < sum(each.nbytes for each in self.newest.layouts.values())

    def is_at_commit(self) -> bool:
        """Return whether no sampler has moved since the newest commit."""
        return self.newest is not None and self._contents.positions() == self._positions

    def _acquire(self, layouts: Mapping[str, Layout]) -> dict[str, Arena]:
        """Return arenas for the next commit; if memory is short, wait for the commit in flight."""
        while True:
            in_flight = self.in_flight()
            arenas, need = self.arenas.choose(in_flight, layouts)
            left = self.room() if need else None
            if left is None or need <= left.nbytes:
                return {name: arenas.get(name) or Arena(layout) for name, layout in layouts.items()}
            where = "in this process's cgroup" if left.limited else "on this host"
            sizes = f"{need / 1e9:.3g} GB of memory, and {left.nbytes / 1e9:.3g} GB are left"
            shortage = f"a commit takes another {sizes} {where}"
            if in_flight is None:
                remedy = "use a host or a limit with more, fewer processes on each host, or a smaller state"
                raise StateError("state", f"{shortage}; {remedy}")
            if not self._has_waited:
                self._has_waited = True
                logger.warning("commits wait for the write before them: %s", shortage)
            self.vacate()

    def _is_unchanged(self, present: Present) -> bool:
        newest = self.newest
        return (
            newest is not None
            and self._contents.positions() == self._positions
            and all(newest.state.get(key) == value for key, value in present.state.items())
            and newest.layouts == present.layouts
            and self._contents.copier.are_copies(present.parts, newest.arenas)
        )


# -- buffers of commits -----------------------------------------------------------------------------------


class Arenas:
    """The memory for commits: the arenas of the newest commit, and of one more."""

    def __init__(self) -> None:
        # Private memory of this process, newest commit first. The next commit overwrites the newest one,
        # unless that is being written. Then it uses a second set of arenas, and the two sets take turns:
        # allocating new memory would take longer than the copy. There are never more than two copies.
        self._private: list[Mapping[str, Arena]] = []
        self._abandoned: list[Callable[[], Snapshot | None]] = []  # writers that may still read memory
        self.near: NearTier | None = None  # in its keeper; commits use the tier's memory if some is free

    def choose(
        self, in_flight: Snapshot | None, layouts: Mapping[str, Layout]
    ) -> tuple[Mapping[str, Arena], int]:
        """Return arenas that the next commit may overwrite, and how many bytes of new memory it needs."""
        self._abandoned = [each for each in self._abandoned if each() is not None]
        read = [in_flight, *(each() for each in self._abandoned)]
        pinned = {arena for snapshot in read if snapshot is not None for arena in snapshot.arenas.values()}
        if self.near is not None and (near := self.near.acquire(layouts, pinned)) is not None:
            return near, 0
        found: Mapping[str, Arena] = {}
        for number, arenas in enumerate(self._private):
            if pinned.isdisjoint(arenas.values()):
                found = arenas
                if number:  # the kernel may have reclaimed it
                    for arena in arenas.values():
                        arena.take_back()
                break
        fitting = {name: arena for name, arena in found.items() if layouts.get(name) == arena.layout}
        return fitting, sum(layout.nbytes for name, layout in layouts.items() if name not in fitting)

    def have_another(self, layouts: Mapping[str, Layout]) -> bool:
        """Return whether a commit of these layouts needs no new memory while another one is written."""
        if self.near is not None and self.near.has_memory:
            return True
        fitting = [{name: arena.layout for name, arena in each.items()} == layouts for each in self._private]
        return sum(fitting) > 1

    def hold(self, newest: Mapping[str, Arena], *, alone: bool = False) -> None:
        """Note the arenas of the newest commit; with ``alone``, free the memory of earlier commits."""
        if any(arena.shared for arena in newest.values()):  # these are files of the near tier
            self._private = []
        else:
            others = [each for each in self._private if set(newest.values()).isdisjoint(each.values())]
            self._private = [newest] if alone else [newest, *others[:1]]

    def release(self, written: Snapshot) -> None:
        """Let the kernel reclaim the memory of a written commit, unless the newest commit uses it."""
        # Called on the writer's thread, while the commit still counts as in flight: the next one does not use
        # the memory yet.
        newest = self._private[0].values() if self._private else ()
        if set(written.arenas.values()).isdisjoint(newest):
            for arena in written.arenas.values():
                arena.offer_back()

    def abandon(self, in_flight: Callable[[], Snapshot | None]) -> None:
        self._abandoned.append(in_flight)
