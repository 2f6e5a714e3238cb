"""The near tier, as one rank sees it: one process of each host keeps it, and all of them recall from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdrecover.checkpoint import near_root, near_tier, root
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.near_root import Keeper
from hvdrecover.checkpoint.near_tier import Buffer, NearTier, Recalled
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.errors import CheckpointError, StorageError
from hvdrecover.state.hooks import Context
from hvdrecover.state.memory import Memory

Files = tuple[Mapping[str, Arena], Mapping[str, str]]
"""Files of a commit, and their digests, by attribute name."""


class NearSide:
    """The near tier. Where it is off, all methods do nothing; where it fails, training continues without it.

    Attributes:
        folder: of the near root; None where the tier is off.
    """

    def __init__(self, settings: Checkpoint | None, context: Context, memory: Memory) -> None:
        self._context = context
        self._memory = memory
        self._url = near_root.named(settings.url) if settings is not None else ""
        self.folder = _folder(settings, context, self._url)
        self._keeper: Keeper | None = None
        self._left: list[Buffer] = []  # what earlier processes left, until the ranks have agreed
        self._recalled: Recalled | None = None
        self._said: str | None = None  # why the tier is off; empty if it is on
        self._is_first = False  # whether this is rank 0; as of the last rendezvous, for the tier's thread
        self._awaits_lock = False

    def recall(self, newer_than: CommitId) -> Recalled | None:
        """Return the newest commit that an earlier process left here, for the election.

        One process of a host does so. The others read it meanwhile, as all are likely to resume from it; see
        `held`.

        Args:
            newer_than: the newest commit in any rank's memory; generation 0 if there is none.
        """
        if self.folder is None:
            return None

        def usable(commit: CommitId) -> bool:
            return commit > newer_than and not commit.is_within(self._context.config.suspects)

        self._is_first = self._context.world.rank() == 0
        if self._tier is not None:  # an interrupted copy has cost this process its newest commit
            return self._tier.newest()
        try:
            if self._is_there(self.folder):
                if self._keeper is not None:
                    self._recalled = near_tier.newest_verified(self._left, usable, self._passed_over)
                else:
                    commits = filter(usable, root.commits(LocalStorage(self.folder)))
                    self._recalled = next(filter(None, map(self._read, commits)), None)
        except (OSError, StorageError) as error:
            self._refuse(str(error))
        return self._recalled if self._keeps else None

    def held(self, commit: CommitId) -> Files:
        """Return the sealed files of a commit that this host has, and their digests; none if it has none."""
        with suppress(OSError, StorageError):  # another rank sends it then
            if self.folder is not None and self._tier is None and self._is_there(self.folder):
                if self._recalled is None or self._recalled.snapshot.id != commit:
                    if self._keeper is None:
                        self._recalled = self._read(commit)
                    else:
                        self._recalled = near_tier.newest_verified(
                            self._left, lambda each: each == commit, self._passed_over
                        )
                if self._recalled is not None:
                    return self._recalled.snapshot.arenas, self._recalled.snapshot.digests or {}
        return {}, {}

    def pass_over(self, commit: CommitId, reason: str) -> None:
        """Report a commit that is not resumed from."""
        self._passed_over(commit.name, reason)

    def give_back(self) -> None:
        """Forget the commit that was recalled."""
        self._recalled = None

    def agreed(self) -> None:
        """The ranks have agreed on a commit: from now on, this process may keep the host's near tier."""
        self.give_back()
        if self.folder is not None and self._keeps:
            self._is_first = self._context.world.rank() == 0
            if self._tier is None:
                self._begin(self.folder)
            self._want()
            self.offer()

    def offer(self) -> None:
        """Have the newest commit in memory sealed, if it lies in the near root."""
        newest = self._memory.newest
        if self._awaits_lock and self.folder is not None:
            self._begin(self.folder)  # a killed process may keep it for a while
            self._want()
        if self._tier is not None and newest is not None and not newest.finished:
            self._tier.seal(newest)

    def settle(self, seconds: float) -> None:
        """Wait for so many seconds at most until the newest commit is sealed."""
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
        """Return whether there is a near root; take it over if this process can keep it."""
        if not path.is_dir():
            return False
        near_root.check_private(path)
        if self._keeps and self._keeper is None and (keeper := Keeper.take(path)) is not None:
            self._keeper, self._left = keeper, near_tier.left(path, self._passed_over)
        return True

    def _read(self, commit: CommitId) -> Recalled | None:
        """Read a sealed commit into memory of this process, as its keeper may overwrite it meanwhile.

        Wrong digests show that it did.
        """
        storage = LocalStorage(self.folder or Path())
        try:
            if not root.is_complete(storage, commit):
                return None
            job = str(root.read_manifest(storage, commit).writer.get("job", ""))
            return Recalled(read_commit(storage, commit), job)
        except CheckpointError as error:
            self._passed_over(commit.name, str(error))
            return None

    def _begin(self, path: Path) -> None:
        try:
            near_root.make(path, self._url)
            self._is_there(path)
        except (OSError, StorageError) as error:
            return self._refuse(str(error))
        self._awaits_lock = self._keeper is None
        if self._keeper is None:
            return self._refuse(f"{path} is in use by another process, or by another state of this one")
        near = NearTier(self._keeper, self._left, self._writer, self._context.clock, self._decided)
        if self._said and self._left:  # else memory is asked for, and then it is said
            self._decided(None, self._left[-1].nbytes)
        self._left = []
        self._memory.arenas.near = near

    def _want(self) -> None:
        """Have memory made for the next commits."""
        newest = self._memory.newest
        if self._tier is not None and newest is not None:
            self._tier.want(newest.layouts)

    def _writer(self) -> dict[str, Any]:
        mine = self._context.place
        return {"host": self._context.config.host, "rank": mine.rank, "job": mine.job}

    def _passed_over(self, name: str, reason: str) -> None:
        message = f"near tier: passing over {name}: {reason}"
        shown = message if self._keeps else None  # one line for each host is enough
        self._context.events.emit("near_skipped", shown, level=logging.WARNING, commit=name, reason=reason)

    def _decided(self, refusal: str | None, nbytes: int) -> None:
        if refusal is not None:
            self._refuse(refusal)
        elif self.folder is not None and self._said != "":
            self._said = ""
            message = (
                f"near tier: on: commits of {near_root.size(nbytes)} outlive their processes in "
                f"{self.folder}, which has memory for {near_root.BUFFERS} of them at most"
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
    return near_root.folder(near, url)
