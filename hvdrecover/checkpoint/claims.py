"""Claims: which job writes to a root. A later generation's claim fences the earlier ones.

A claim is a file ``claims/g0003.json``, created by the one process that writes generation 3, and never by
two. It also records whether a commit of that generation has been acknowledged, so that a root whose commits
have all vanished is told from one whose first commit was never completed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.root import CLAIMS
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.clock import Clock
from hvdrecover.errors import FencedError, StorageError

_NAME = re.compile(r"g([0-9]{4,9})\.json")


@dataclass(frozen=True)
class Claim:
    """A job's word that it writes a generation.

    Attributes:
        generation: the generation.
        job: identity of the job.
        acknowledged: whether a commit of this generation has become durable.
    """

    generation: int
    job: str
    acknowledged: bool


def among(names: Iterable[str]) -> list[int]:
    """The generations whose claims have these names, newest first."""
    found = {int(match[1]): match[0] for match in map(_NAME.fullmatch, names) if match}
    return sorted((claim for claim, name in found.items() if name == _name(claim)), reverse=True)


class Claims:
    """The claims of one root, as a process sees them that may make some.

    Args:
        storage: the root.
        job: identity of this job, the same on all its ranks and through all its recoveries.
        host: name of this host.
        clock: where times come from.
    """

    def __init__(self, storage: Storage, *, job: str, host: str, clock: Clock) -> None:
        self._storage = storage
        self._job = job
        self._host = host
        self._clock = clock
        self._ours = 0
        self._tried = b""  # the claim that was last created, or not: an attempt can fail when it is there
        self._acknowledged = 0

    def generations(self) -> list[int]:
        """The claimed generations, newest first."""
        return among(self._storage.names(CLAIMS))

    def newest(self) -> int:
        """The newest claimed generation; 0 if there is none."""
        return next(iter(self.generations()), 0)

    def read(self, generation: int) -> Claim:
        """One claim. One that is damaged is nobody's, and may have had commits."""
        try:
            fields = json.loads(root.read_note(self._storage, _path(generation)))
            return Claim(generation, str(fields["job"]), bool(fields["acknowledged"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return Claim(generation, "", True)

    def take_after(self, generation: int) -> int:
        """Claim the first generation after this one that nobody has claimed, for a job that starts."""
        generation += 1
        while not self._create(generation):
            generation += 1
        return generation

    def take(self, generation: int) -> None:
        """Claim a generation that this job has reached by a recovery.

        Raises:
            FencedError: another job, or a later generation of this one, has claimed the root.
            StorageError: an earlier claim of this job is gone.
        """
        self.check(generation)
        if self._ours == generation:
            return
        newest = self.newest()
        if newest == generation and self._storage.read(_path(generation)) == self._tried:
            self._ours = generation  # the attempt that failed had put the claim there
            return
        same_job = newest in (0, self._ours) or self.read(newest).job == self._job
        if newest == generation or not same_job:
            raise self._fenced(newest)
        if not self._create(generation):
            raise self._fenced(generation)

    def check(self, generation: int) -> None:
        """Make sure that no later generation has claimed the root.

        Raises:
            FencedError: one has.
            StorageError: the claim of this job itself is gone.
        """
        claimed = self.generations()
        newest = max(claimed, default=0)
        if newest > generation:
            raise self._fenced(newest)
        if self._ours not in (0, *claimed):
            raise StorageError(
                self._storage.url,
                f"the claim {_path(self._ours)} of this job is gone, so the root was deleted, emptied or "
                "unmounted, and is not made anew. Bring it back, or start the job again.",
            )

    def acknowledge(self, generation: int) -> None:
        """Note once in the claim that commits exist, so that their loss can't pass for an empty root."""
        if self._acknowledged != generation:
            self._storage.publish(_path(generation), self._text(acknowledged=True))
            self._acknowledged = generation

    def _create(self, generation: int) -> bool:
        self._tried = self._text(acknowledged=False)
        created = self._storage.create(_path(generation), self._tried)
        if created:
            self._ours = generation
        return created

    def _text(self, *, acknowledged: bool) -> bytes:
        fields = {
            "job": self._job,
            "host": self._host,
            "pid": os.getpid(),
            "time": self._clock.now(),
            "acknowledged": acknowledged,
        }
        return json.dumps(fields).encode()

    def _fenced(self, newest: int) -> FencedError:
        return FencedError(
            self._storage.url,
            f"generation {newest} has claimed this checkpoint root, so this process belongs to a job that "
            "was replaced and must stop. If two jobs share one root on purpose, give each its own.",
        )


def _name(generation: int) -> str:
    return f"g{generation:04d}.json"


def _path(generation: int) -> str:
    return f"{CLAIMS}/{_name(generation)}"
