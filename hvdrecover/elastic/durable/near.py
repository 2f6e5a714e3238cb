"""The near tier, as one rank sees it: one process per host keeps it, and all of them recall from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.near import place, recall, room
from hvdrecover.checkpoint.near.place import Keeper
from hvdrecover.checkpoint.near.recall import Files, Recalled, Usable
from hvdrecover.checkpoint.near.slots import Slot
from hvdrecover.checkpoint.near.tier import NearTier
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.commits.memory import Memory
from hvdrecover.elastic.context import Context
from hvdrecover.errors import StorageError

_ANY = CommitId(10**9, 0)  # after all others: of a slot into which a commit was being copied


class NearSide:
    """The near tier. Where it is off, all of it does nothing; where it fails, training continues without.

    Args:
        settings: the user's wishes; None without a checkpoint root.
        context: the surroundings.
        memory: holds the commits.

    Attributes:
        folder: of the near root; None where the tier is off.
    """

    def __init__(self, settings: Checkpoint | None, context: Context, memory: Memory) -> None:
        self._context = context
        self._memory = memory
        self._url = place.named(settings.url) if settings is not None else ""
        self.folder = _folder(settings, context, self._url)
        self._keeper: Keeper | None = None
        self._left: list[Slot] = []  # what was found, until the ranks have agreed
        self._mine: list[Arena] = []  # of the commit that was recalled
        self._borrowed: tuple[CommitId, Files] | None = None  # the same, where another process keeps it
        self._said: str | None = None  # why it is off; empty if it is on
        self._is_first = False  # whether this is rank 0; as of the last rendezvous, for the tier's thread
        self._awaits_lock = False

    def recall(self, newer_than: CommitId) -> Recalled | None:
        """Return the newest commit that a process before this one has left here; for one that starts anew.

        One process of a host does so. The others look at it meanwhile, and can get at it by `held`.

        Args:
            newer_than: the newest commit in any rank's memory, as an older one is of no use; generation 0 if
                there is none.
        """
        if self.folder is None:
            return None

        def usable(commit: CommitId) -> bool:
            return commit > newer_than and not commit.is_within(self._context.config.suspects)

        if not self._keeps:
            self._foresee(self.folder, usable)
            return None
        self._is_first = self._context.world.rank() == 0
        if self._tier is not None:  # this process has lost its memory of what it had sealed
            newest = self._tier.newest()
            return None if newest is None else Recalled(*newest)
        try:
            recall.pass_over_others(self.folder, usable, self._passed_over)
            if not self._is_there(self.folder):
                return None
            if self._keeper is None:
                return recall.by_copy(self.folder, usable, self._passed_over)
            found = recall.in_place(self.folder, self._left, usable, self._passed_over)
            self._mine = [] if found is None else list(found.snapshot.arenas.values())
            return found
        except (OSError, StorageError) as error:
            self._refuse(str(error))
            return None

    def held(self, commit: CommitId) -> Files:
        """Return what a process before this one, or one beside it, has of a commit; no file if it is nothing.

        It need not be sealed, and nobody vouches for it: it is of use only if it has the digests of a commit
        that a rank is known to hold.

        Args:
            commit: which one.
        """
        with suppress(OSError, StorageError, ValueError):  # it is sent, then
            if self.folder is not None and self._tier is None and self._is_there(self.folder):
                if self._keeper is None:
                    return self._borrow(self.folder, commit)
                for slot in self._left:
                    if slot.copied == commit:
                        digests = slot.digests()
                        return slot.arenas, digests
        return {}, {}

    def base(self, layouts: Mapping[str, Layout]) -> Mapping[str, Arena]:
        """Return memory for a commit that is about to be received; empty if there is none.

        It may hold a part of that very commit, if a process was killed while it copied it; or the one before
        it, of which training may have changed but a part. It holds neither this rank's newest commit nor the
        newest sealed one: the agreement may fail.

        Args:
            layouts: of the commit's files, by attribute name.
        """
        sealed = max((slot.commit for slot in self._left if slot.commit is not None), default=None)
        mine = [
            *self._mine,
            *(self._memory.newest.arenas.values() if self._memory.newest is not None else ()),
        ]
        spare = [slot for slot in self._left if slot.commit is None or slot.commit != sealed]
        fitting = [slot for slot in spare if slot.fits(layouts) and not slot.shares(mine)]
        with suppress(OSError):  # then it has no arenas
            for slot in sorted(fitting, key=lambda each: each.copied or _ANY, reverse=True):
                slot.map()
                if slot.take():
                    slot.open()
                    slot.look_up()
                    return slot.arenas
        return {}

    def pass_over(self, commit: CommitId, reason: str) -> None:
        """Report a commit that is not resumed from."""
        self._passed_over(commit.name, reason)

    def give_back(self) -> None:
        """Borrow nothing any more, beside what has been adopted."""
        self._borrowed, self._mine = None, []

    def agreed(self) -> None:
        """The ranks have agreed on a commit: from now on, this process may keep the host's near tier."""
        self.give_back()
        if self.folder is None or not self._keeps:
            return
        self._is_first = self._context.world.rank() == 0
        if self._tier is None:
            self._begin(self.folder)
        self._want()
        self.offer()

    def offer(self) -> None:
        """Have the newest commit in memory sealed, if it lies in the near root."""
        newest = self._memory.newest
        if self._awaits_lock and self.folder is not None:
            self._begin(self.folder)  # a process that was killed may keep it for a while
            self._want()
        if self._tier is not None and newest is not None and not newest.finished:
            self._tier.seal(newest)

    def settle(self, seconds: float) -> None:
        """Give the commit that is being sealed so many seconds to be."""
        if self._tier is not None:
            self._tier.wait(seconds)

    def remove(self) -> None:
        """Delete the near root: this process leaves, and the commit is durable or others have it."""
        if self._tier is not None:
            self._tier.remove()
        elif self._keeper is not None:
            self._keeper.remove()
        self._memory.arenas.near = self._keeper = None
        self._left, self._awaits_lock = [], False

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def _tier(self) -> NearTier | None:
        return self._memory.arenas.near

    @property
    def _keeps(self) -> bool:
        """Return whether this process is the one of its host that keeps the tier."""
        return self._context.config.is_first_of_host

    def _is_there(self, path: Path) -> bool:
        """Return whether there is a near root; see what is left in it if this process can keep it.

        Raises:
            OSError: it can't be read.
            StorageError: it is another user's.
        """
        if not path.is_dir():
            return False
        place.check_private(path)
        if self._keeps and self._keeper is None and (keeper := Keeper.take(path)) is not None:
            self._keeper, self._left = keeper, recall.found(path, self._passed_over)
        return True

    def _foresee(self, path: Path, usable: Usable) -> None:
        """Borrow the newest sealed commit, while its keeper verifies it: all are likely to resume from it."""
        with suppress(OSError, StorageError, ValueError):  # it is sent, then
            newest = recall.newest(path, usable) if self._is_there(path) else None
            if newest is not None:
                self._borrow(path, newest)

    def _borrow(self, path: Path, commit: CommitId) -> Files:
        if self._borrowed is None or self._borrowed[0] != commit:
            self._borrowed = None
            self._borrowed = commit, recall.borrowed(path, commit)
        return self._borrowed[1]

    def _begin(self, path: Path) -> None:
        try:
            if not self._is_there(path):
                place.make(path, self._url)
                self._is_there(path)
            self._awaits_lock = self._keeper is None
            if self._keeper is None:
                return self._refuse(f"{path} is in use by another process, or by another state of this one")
            place.make(path, self._url)
            self._open_all_but_older()
        except (OSError, StorageError) as error:
            return self._refuse(str(error))
        self._delete_expired(path)
        tier = NearTier(self._keeper, self._writer, self._context.clock, self._decided)
        tier.take_over(self._left)
        if self._said and self._left:  # else memory is asked for, and then it is said
            self._decided(None, self._left[-1].nbytes)
        self._left = []
        self._memory.arenas.near = tier

    def _want(self) -> None:
        """Have memory made for the next commits."""
        newest = self._memory.newest
        if self._tier is not None and newest is not None:
            self._tier.want(newest.layouts)

    def _open_all_but_older(self) -> None:
        """Take away what was left; an older sealed commit stays until this start has sealed one."""
        newest = self._memory.newest
        for slot in self._left:
            is_newer = newest is None or slot.commit is None or slot.commit > newest.id
            if is_newer and not slot.holds(newest.arenas if newest is not None else {}):
                slot.open()  # of a start that is over, perhaps under a later generation

    def _writer(self) -> dict[str, Any]:
        place = self._context.place
        return {"host": self._context.config.host, "rank": place.rank, "job": place.job}

    def _delete_expired(self, path: Path) -> None:
        """Delete near roots of this user that were not used for days, and spare memory sooner."""
        context, now = self._context, self._context.clock.now()
        with suppress(OSError, StorageError):  # of other jobs: no trouble of ours
            found = place.roots(str(path.parent.parent))
            for unused in place.expired(found, now, place.SPARE_LIFETIME):
                place.trim(unused.path)
            for old in place.expired(found, now):
                if place.remove(old.path):
                    days = (now - old.used) / 86400
                    message = (
                        f"near tier: deleted {old.path} of {old.url}, which was not used for {days:.0f} days"
                    )
                    context.events.emit("near_expired", message, path=str(old.path), bytes=old.nbytes)

    def _passed_over(self, name: str, reason: str) -> None:
        message = f"near tier: passing over {name}: {reason}"
        shown = message if self._keeps else None  # one line a host is enough
        self._context.events.emit("near_skipped", shown, level=logging.WARNING, commit=name, reason=reason)

    def _decided(self, refusal: str | None, nbytes: int) -> None:
        if refusal is not None:
            self._refuse(refusal)
        elif self.folder is not None and self._said != "":
            self._said = ""
            message = (
                f"near tier: on: commits of {room.size(nbytes)} outlive their processes in {self.folder}, "
                f"which has memory for {room.SLOTS} of them at most"
            )
            self._announce(message, on=True, reason="", bytes=nbytes)

    def _refuse(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            message = f"near tier: off on {self._context.config.host}: {reason}"
            self._announce(message, on=False, reason=reason, bytes=0)

    def _announce(self, message: str, *, on: bool, reason: str, bytes: int) -> None:
        """Emit an event on each host, with a line on the terminal from rank 0."""
        shown = message if self._is_first else None
        level = logging.INFO if on else logging.WARNING
        path = str(self.folder)
        self._context.events.emit("near", shown, level=level, on=on, reason=reason, bytes=bytes, path=path)


def _folder(settings: Checkpoint | None, context: Context, url: str) -> Path | None:
    """Return the near root's folder; None where the tier is off."""
    if settings is None or settings.near is None:
        return None
    near = context.config.near if settings.near == "auto" else settings.near
    if near == "off" or (near == "auto" and context.config.supervisor is None):
        return None
    return place.folder(near, url)
