"""The near tier of one host, as the process sees it that keeps it."""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import TENSORS, FileEntry, Manifest
from hvdrecover.checkpoint.near import room
from hvdrecover.checkpoint.near.digests import Digests
from hvdrecover.checkpoint.near.place import Keeper
from hvdrecover.checkpoint.near.slots import Slot
from hvdrecover.checkpoint.niceness import step_back
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.clock import Clock

_NICENESS = 5  # of the tier's thread: behind training, but not by so much that steps overtake it
_FIRST = 2  # slots: the newest sealed commit lies in one, the next commit goes to the other
_SEALED = 2  # commits that stay sealed: the one before the newest counts if that turns out to be broken
_PATIENCE = 10  # commits in a row with other tensors each, after which no memory is made for the next

Layouts = Mapping[str, Layout]
Decided = Callable[[str | None, int], None]
"""Called with the reason why commits of so many bytes are not kept, or with None if they are."""


@dataclass(frozen=True, eq=False)
class _Commit:
    """A commit to be sealed, the slot that it lies in, who has made it, and its digests."""

    snapshot: Snapshot
    slot: Slot
    writer: dict[str, Any]
    digests: Digests


class NearTier:
    """Memory for commits at a near root, and the thread that seals them.

    A commit is sealed after it was copied, beside training: its digests are computed, and its manifest is
    written. That is done without haste until the next commit comes. If that needs its memory before it is
    done, it is not sealed. So what is sealed may be a commit or two behind, and is always a whole one.

    Args:
        keeper: the right to change the near root.
        writer: returns who writes, for manifests; called on the training thread.
        clock: where times come from.
        decided: called on the tier's thread when memory was asked for, when a commit could not be sealed, and
            when one is sealed again.
    """

    def __init__(
        self, keeper: Keeper, writer: Callable[[], dict[str, Any]], clock: Clock, decided: Decided
    ) -> None:
        self.keeper = keeper
        self._writer = writer
        self._clock = clock
        self._decided = decided
        self._lock = threading.Lock()  # over what follows
        self._slots: list[Slot] = []
        self._sealed: list[Slot] = []  # those with a commit, oldest first
        self._sealing: _Commit | None = None  # what the thread is at
        self._waiting: _Commit | None = None
        self._newest: _Commit | None = None  # the last one that was sealed, while it is
        self._given_up: list[Slot] = []  # to be deleted once another commit is sealed
        self._asked: tuple[Layouts, int] | None = None  # for how many commits memory was asked for last
        self._reserve = 0  # bytes that were left to others
        self._given_back: weakref.WeakSet[Arena] = weakref.WeakSet()  # and still mapped
        self._misses = 0  # times in a row that memory was asked for and did not fit the next commit
        self._has_failed = False  # since a commit was sealed last
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take_over(self, slots: Sequence[Slot]) -> None:
        """Take over what a process before this one has left: commits, oldest first, and memory.

        What is not mapped yet is mapped beside training.
        """
        with self._lock:
            self._slots += [slot for slot in slots if slot.arenas]
            self._sealed += [slot for slot in slots if slot.commit is not None]
        for slot in slots:
            if not slot.arenas:
                self._do(functools.partial(self._map, slot))

    def owns(self, arenas: Mapping[str, Arena]) -> bool:
        """Return whether arenas lie in the near root, or did until its memory was given back."""
        with self._lock:
            return self._slot_of(arenas) is not None or not self._given_back.isdisjoint(arenas.values())

    @property
    def has_memory(self) -> bool:
        """Return whether it has memory for any commit, free or not; it has none if it was refused."""
        with self._lock:
            return bool(self._slots)

    def acquire(self, layouts: Layouts, pinned: Collection[Arena]) -> Mapping[str, Arena] | None:
        """Return memory that the next commit may be copied into; None if it has to go elsewhere this time.

        Args:
            layouts: of the commit's files, by attribute name.
            pinned: arenas that are being read, and must not change.
        """
        if not layouts:
            return None  # a state without tensors is not worth a file
        with self._lock:
            if self._sealing is not None:
                self._sealing.digests.hurry()
            fitting = [slot for slot in self._slots if slot.fits(layouts)]
            free = [slot for slot in fitting if not slot.shares(pinned)]
            slot, is_short = self._choose(free)
            while slot is not None and not slot.take():
                free.remove(slot)
                slot, is_short = self._choose(free)
            if slot is not None:
                self._misses = 0
                self._take(slot)
        if is_short:
            self._ask(layouts, room.SLOTS if fitting else _FIRST)
        return None if slot is None else slot.arenas

    def want(self, layouts: Layouts) -> None:
        """Have memory made for commits of these layouts, if there is none."""
        with self._lock:
            has_some = not layouts or any(slot.fits(layouts) for slot in self._slots)
        if not has_some:
            self._ask(layouts, _FIRST)

    def newest(self) -> tuple[Snapshot, str] | None:
        """Return the newest commit that this process has sealed, and the job that it was made in."""
        with self._lock:
            newest = self._newest
        return None if newest is None else (newest.snapshot, str(newest.writer["job"]))

    def give_up(self, arenas: Mapping[str, Arena]) -> None:
        """Never hand this memory out again: somebody may read it for ever."""
        with self._lock:
            slot = self._slot_of(arenas)
            if slot is not None:
                self._slots.remove(slot)
                self._given_up.append(slot)
                self._asked = None

    def seal(self, snapshot: Snapshot) -> None:
        """Have a commit sealed that was copied into memory from `acquire`; others are passed over."""
        writer = self._writer()
        with self._lock:
            slot = self._slot_of(snapshot.arenas)
            if slot is None:
                return
            slot.label(snapshot.id)
            self._waiting = _Commit(snapshot, slot, writer, Digests(slot.arenas))
        self._do(self._seal_waiting)

    def wait(self, timeout: float) -> bool:
        """Wait until all that was asked for is done; return whether that is so.

        Args:
            timeout: seconds.
        """
        done = threading.Event()
        with self._lock:
            for order in (self._sealing, self._waiting):
                if order is not None:
                    order.digests.hurry()
        self._do(done.set)
        return self._clock.wait(done, timeout)

    def stop(self) -> None:
        """End the thread, and let another process keep the near root. What is sealed stays."""
        self._end_thread()
        self.keeper.release()

    def remove(self) -> None:
        """End the thread, and delete the near root."""
        self._end_thread()
        self.keeper.remove()

    # -- on the training thread ------------------------------------------------------------------------

    def _choose(self, free: Sequence[Slot]) -> tuple[Slot | None, bool]:
        """Return the slot for the next commit; and whether one more slot would have been better."""
        sealing = None if self._sealing is None else self._sealing.slot
        waiting = None if self._waiting is None else self._waiting.slot
        newest = self._sealed[-1] if self._sealed else None
        idle = [slot for slot in free if slot not in (sealing, waiting, newest)]
        if idle:
            return min(idle, key=lambda slot: slot in self._sealed), False  # memory without a commit first
        # Otherwise the newest commit is not sealed. Rather that than to be without any.
        for busy in (waiting, sealing):
            if busy in free and busy is not newest:
                return busy, True
        # Then the others are being read, and stay. If one of them is sealed, or is in a moment, that will do.
        safe = [slot for slot in (*self._sealed, sealing) if slot is not None and slot not in free]
        if newest in free and safe:
            return newest, True
        return None, True

    def _take(self, slot: Slot) -> None:
        if self._waiting is not None and self._waiting.slot is slot:
            self._waiting = None
        if self._sealing is not None and self._sealing.slot is slot:
            self._sealing.digests.cancel()
            self._sealing = None
        if slot in self._sealed:
            self._sealed.remove(slot)
        if self._newest is not None and self._newest.slot is slot:
            self._newest = None
        slot.open()

    def _ask(self, layouts: Layouts, count: int) -> None:
        differs = self._asked is None or self._asked[0] != layouts
        self._misses += differs
        if self._misses == _PATIENCE:
            reason = f"the tensors were others at {_PATIENCE} commits in a row"
            self._do(lambda: self._decided(reason, 0))
        if self._misses < _PATIENCE and (differs or self._asked is None or self._asked[1] < count):
            self._asked = (layouts, count)
            self._do(lambda: self._prepare(layouts, count))

    def _slot_of(self, arenas: Mapping[str, Arena]) -> Slot | None:
        return next((slot for slot in self._slots if slot.holds(arenas)), None)

    def _do(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdrecover-near", daemon=True)
            self._thread.start()

    def _end_thread(self) -> None:
        with self._lock:
            if self._sealing is not None:
                self._sealing.digests.cancel()
            self._sealing = self._waiting = None
            for slot in self._slots:
                slot.let_go()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    # -- on the tier's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        step_back(_NICENESS)
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # training never fails by it
                self._has_failed = True
                with suppress(Exception):
                    self._decided(f"{self.keeper.path} can't be used: {error!r}", 0)

    def _map(self, slot: Slot) -> None:
        try:
            slot.map()
        except OSError:  # new memory is asked for in its place
            slot.delete()
            with self._lock:
                self._sealed = [each for each in self._sealed if each is not slot]
            return
        slot.look_up()
        with self._lock:
            self._slots.append(slot)

    def _prepare(self, layouts: Layouts, count: int) -> None:
        """Get memory for commits of these layouts; that for others goes."""
        nbytes = sum(layout.nbytes for layout in layouts.values())
        with self._lock:
            stale = [slot for slot in self._slots if not slot.fits(layouts) and slot not in self._sealed[-1:]]
            self._drop(stale)
            asked = self._asked is not None and self._asked[0] == layouts
            fitting = len([slot for slot in self._slots if slot.fits(layouts)])
        for slot in stale:
            slot.delete()
        if not asked:
            return  # the next commit will be of other layouts
        found = room.look(self.keeper.path)
        self._reserve, refused = room.reserve(found), room.refusal(found, nbytes, fitting * nbytes)
        while refused is None and fitting < count:
            try:
                slot = Slot.make(self.keeper.path, layouts)
            except OSError as error:
                refused = f"no memory for a commit: {error}"
                break
            fitting += 1
            with self._lock:
                self._slots.append(slot)
        if count == _FIRST:
            self._decided(refused, nbytes)

    def _seal_waiting(self) -> None:
        with self._lock:
            order, self._waiting = self._waiting, None
            self._sealing = order
        if order is None:
            return
        stale: list[Slot] = []
        try:
            if (found := order.snapshot.digests or order.digests.compute()) is not None:
                text = manifests.dumps(self._manifest(order, found))
                with self._lock:
                    if self._sealing is order:
                        stale = self._seal(order, text)
        finally:
            with self._lock:
                if self._sealing is order:
                    self._sealing = None
        for slot in stale:
            slot.delete()
        if self._has_failed and self._newest is order:
            self._has_failed = False
            self._decided(None, order.slot.nbytes)
        self._give_back_if_short()

    def _give_back_if_short(self) -> None:
        """Delete all commits and memory when others need it: their next allocation fails, with no warning."""
        if (left := room.free(self.keeper.path)) >= self._reserve // 2:
            return
        with self._lock:
            slots = list(self._slots)
            for slot in slots:
                self._given_back.update(slot.arenas.values())
            self._drop(slots)
        for slot in slots:
            slot.delete()
        if slots:
            nbytes = slots[0].nbytes
            reason = f"other programs had only {room.size(left)} left, so the tier's memory was given back"
            self._decided(reason, nbytes)

    def _manifest(self, order: _Commit, found: Mapping[str, str]) -> Manifest:
        layouts, writer = order.slot.layouts, {**order.writer, "pid": os.getpid()}
        files = [
            FileEntry(f"{name}{TENSORS}", layouts[name].nbytes, digest) for name, digest in found.items()
        ]
        return order.snapshot.manifest(files, writer, self._clock.now())

    def _seal(self, order: _Commit, text: bytes) -> list[Slot]:
        """Seal a commit; return the slots that are of no use any more, to be deleted."""
        slot = order.slot
        slot.seal(order.snapshot.id, text)  # if that fails, what it was sealed as stays
        self._sealed = [*(each for each in self._sealed if each is not slot), slot]
        self._newest = order
        stale = [each for each in self._slots if not each.fits(slot.layouts)]
        self._drop(stale)
        given_up, self._given_up = self._given_up, []
        self._sealed = [each for each in self._sealed if each not in given_up]
        for older in self._sealed[:-_SEALED]:
            older.open()
        del self._sealed[:-_SEALED]
        return stale + given_up

    def _drop(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._take(slot)
            self._slots.remove(slot)
