"""The near tier, as one rank sees it: one process of each host keeps it, and all of them recall from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdrecover.checkpoint import Checkpoint, CommitId, near_tier, root
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.near_tier import Keeper, NearTier
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.errors import CheckpointError, NoUsableCommitError, StorageError
from hvdrecover.state.hooks import Context
from hvdrecover.state.memory import Memory

Files = tuple[Mapping[str, Arena], Mapping[str, str]]
"""Files of a commit, and their digests, by attribute name."""


class NearSide:
    """The near tier; all methods do nothing where it is off, and where it fails, training continues."""

    def __init__(self, settings: Checkpoint | None, context: Context, memory: Memory) -> None:
        self._context, self._memory, self._arenas = context, memory, memory.arenas
        self._keeps = context.config.is_first_of_host
        self.folder: Path | None = None
        if settings is not None and settings.near is not None:
            near = context.config.near if settings.near == "auto" else settings.near
            if near != "off" and (near != "auto" or context.config.supervisor is not None):
                self._url = near_tier.named(settings.url)
                self.folder = near_tier.folder(near, self._url)
        self._keeper: Keeper | None = None
        self._recalled: Snapshot | None = None
        self._said: str | None = ""  # why the tier is off, None if it is on; empty at first
        self._awaits_lock = False

    def recall(self, newer_than: CommitId) -> Snapshot | None:
        """Return the newest commit that an earlier process left here, if it is newer than all in memory."""
        if self.folder is None:
            return None
        suspects, self._recalled = self._context.config.suspects, None
        if self._arenas.near is not None:  # an interrupted copy has cost this process its newest commit
            return self._arenas.near.newest()
        self._recalled = self._read(lambda each: each > newer_than and not each.is_within(suspects))
        return self._recalled if self._keeps else None  # the host's other processes read it for `held`

    def held(self, commit: CommitId) -> Files:
        """Return the sealed files of a commit that this host has, and their digests; none if it has none."""
        if self.folder is not None and self._arenas.near is None:
            if self._recalled is None or self._recalled.id != commit:
                self._recalled = self._read(lambda each: each == commit)
            if self._recalled is not None:
                return self._recalled.arenas, self._recalled.digests or {}
        return {}, {}  # another rank sends it then

    def pass_over(self, commit: CommitId, reason: str) -> None:
        # Only one process of each host shows the line.
        shown = f"near tier: passing over {commit.name}: {reason}" if self._keeps else None
        facts = {"commit": commit.name, "reason": reason}
        self._context.events.emit("near_skipped", shown, level=logging.WARNING, **facts)

    def agreed(self) -> None:
        if self.folder is not None and self._keeps:
            self._begin(self.folder)  # from now on, this process may keep the host's near tier
            self.offer()
        self._recalled = None

    def offer(self) -> None:
        """Seal the newest commit in memory, if its files are in the near root."""
        newest = self._memory.newest
        if self._awaits_lock and self.folder is not None:
            self._begin(self.folder)  # a killed process may keep it for a while
        if self._arenas.near is not None and newest is not None and not newest.finished:
            self._arenas.near.seal(newest)

    def settle(self, seconds: float) -> None:
        if self._arenas.near is not None:
            self._arenas.near.wait(seconds)

    def remove(self) -> None:
        """Delete the near root: this process leaves, and the commit is durable or others have it."""
        if self._arenas.near is not None:
            self._arenas.near.remove()
        elif self._keeper is not None:
            self._keeper.remove()
        self._arenas.near = self._keeper = None
        self._awaits_lock = False

    # -- inside ----------------------------------------------------------------------------------------

    def _read(self, usable: Callable[[CommitId], bool]) -> Snapshot | None:
        """Return the newest usable commit that verifies."""
        path = self.folder
        if path is None or not path.is_dir():
            return None
        storage = LocalStorage(path)

        def skipped(commit: CommitId, reason: str, error: CheckpointError | None) -> None:
            if error is not None:  # otherwise the folder is memory for a commit
                self.pass_over(commit, reason)
                if self._keeper is not None:
                    storage.remove(root.manifest_path(commit))

        try:
            near_tier.check_private(path)
            if self._keeps and self._keeper is None:
                self._keeper = Keeper.take(path)
            found = root.read_newest(
                storage,
                skipped,
                clock=self._context.clock,
                order=lambda commits: list(filter(usable, commits)),
                # If the keeper overwrites a commit while it is copied, the copy's digests are wrong.
                load=root.copied if self._keeper is None else near_tier.mapped,
            )
            for arena in found.arenas.values() if found is not None else ():
                arena.shared = self._keeper is not None  # then the files must not become private memory
            return found
        except NoUsableCommitError:
            return None
        except (OSError, CheckpointError) as error:
            self._decided(str(error))
            return None

    def _begin(self, path: Path) -> None:
        try:
            near_tier.make(path, self._url)
            self._keeper = self._keeper or Keeper.take(path)
            self._awaits_lock = self._keeper is None
            if self._keeper is None:
                reason = f"{path} is in use by another process, or by another state of this one"
                return self._decided(reason)
            place = self._context.place
            writer = {"host": self._context.config.host, "rank": place.rank, "job": place.job}
            tier = self._arenas.near or NearTier(
                self._keeper, self._recalled, self._context.clock, self._decided
            )
            tier.begin(writer)
            self._arenas.near = tier
        except (OSError, StorageError) as error:
            self._decided(str(error))

    def _decided(self, refusal: str | None, nbytes: int = 0) -> None:
        """Emit an event when the tier turns on, for commits of ``nbytes``, or off, because of ``refusal``."""
        if refusal == self._said:
            return
        self._said = refusal
        message, level = f"near tier: off on {self._context.config.host}: {refusal}", logging.WARNING
        if refusal is None:
            level = logging.INFO
            message = (
                f"near tier: on: commits of {near_tier.size(nbytes)} outlive their processes in "
                f"{self.folder}, which has memory for {near_tier.BUFFERS} of them at most"
            )
        facts = {"on": refusal is None, "reason": refusal or "", "bytes": nbytes, "path": str(self.folder)}
        # Called on the tier's thread, too, perhaps between two rendezvous: `World.rank` would fail there.
        shown = message if self._context.events.rank == 0 else None
        self._context.events.emit("near", shown, level=level, **facts)
