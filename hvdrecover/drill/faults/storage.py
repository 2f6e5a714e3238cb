"""Faults of the storage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fsspec.registry import known_implementations, registry

from hvdrecover.drill import storage
from hvdrecover.drill.faults.fault import Drilled, Plain


class _Moody(Plain):
    """A fault of a storage that a drill rules; the run has its checkpoint root there."""

    lasting: ClassVar[bool] = True

    def lacks(self, run: Drilled) -> str:
        """Return whether processes find the storage's file system."""
        if storage.PROTOCOL in {*known_implementations, *registry}:
            return ""
        return (
            f"fsspec does not know '{storage.PROTOCOL}', as hvdrecover is not installed, or an earlier one; "
            "install it again: pip install ."
        )

    def options(self, run: Drilled) -> list[str]:
        """The URL of the root."""
        return ["--checkpoint", storage.url(run.root)]

    def _set(self, run: Drilled, **changes: Any) -> None:
        storage.set_mood(run.root, replace(storage.mood(run.root), **changes))


@dataclass(frozen=True)
class StorageAway(_Moody):
    """Every call of the storage fails, as of a server that can't be reached.

    Training continues with commits in memory; there is one warning when that begins and one when it ends, and
    the newest commit that is due then becomes durable. A fault meanwhile is recovered from out of memory; a
    job that has none left waits for the storage.
    """

    name: ClassVar[str] = "storage-away"
    summary: ClassVar[str] = "the storage can't be reached"

    def strike(self, run: Drilled, rank: int) -> None:
        """Take it away."""
        self._set(run, away=True)

    def end(self, run: Drilled) -> None:
        """Bring it back, with all it had."""
        self._set(run, away=False)


@dataclass(frozen=True)
class DiskFull(_Moody):
    """Nothing can be written for lack of space, while files can be read and deleted.

    As `StorageAway`; the durable commits stay.
    """

    name: ClassVar[str] = "disk-full"
    summary: ClassVar[str] = "the storage has no space left"

    def strike(self, run: Drilled, rank: int) -> None:
        """Fill it."""
        self._set(run, full=True)

    def end(self, run: Drilled) -> None:
        """Let there be space."""
        self._set(run, full=False)


@dataclass(frozen=True)
class StorageSlow(_Moody):
    """Every call of the storage takes its time.

    Writes continue beside training, so that it keeps its pace; commits become durable later, and some that
    come meanwhile are kept in memory only.

    Attributes:
        seconds: that a call takes longer.
    """

    name: ClassVar[str] = "storage-slow"
    summary: ClassVar[str] = "the storage is slow"

    seconds: float = 0.5

    def strike(self, run: Drilled, rank: int) -> None:
        """Slow it down."""
        self._set(run, slow=self.seconds)

    def end(self, run: Drilled) -> None:
        """Let it be as fast as it was; calls that wait return."""
        self._set(run, slow=0.0)


@dataclass(frozen=True)
class StorageFlaky(_Moody):
    """Some calls of the storage fail, as over a connection that breaks.

    They are made again, and commits become durable.

    Attributes:
        probability: with which a call fails.
        seed: decides which ones do.
    """

    name: ClassVar[str] = "storage-flaky"
    summary: ClassVar[str] = "calls of the storage fail now and then"

    probability: float = 0.05
    seed: int = 0

    def strike(self, run: Drilled, rank: int) -> None:
        """Let calls fail."""
        self._set(run, flaky=self.probability, seed=self.seed)

    def end(self, run: Drilled) -> None:
        """Let them succeed."""
        self._set(run, flaky=0.0)
