"""Claims: which job may write to a root, in which start of the job, and after which rendezvous.

A claim is a file such as ``claims/g0003.json``. The one process that writes generation 3 creates it. It
names its job, its start, and the generation under which that start *took* the root, `Claim.first`:

- The root belongs to the start that took it last: the start whose claim has the highest `Claim.first`. A
  start takes the root under a number above all claims. A recovery does not take the root: its claim
  repeats the `Claim.first` of the start. So a late claim of a replaced process has no effect, however high
  its number is.
- Within a start, the process with the highest generation writes. A recovery has left earlier ones behind.
- A start has taken the root when it reads its own claim as the newest. Otherwise it claims again, with a
  number above the newest.
- A job that another job has replaced never takes the root back: its next start is refused.

Each process reads the claims before it claims, after it has claimed, and before and after it publishes a
manifest. If two processes claim at the same time, at least one sees the claim of the other, and both decide
by these rules.

A claim also records whether a commit of its generation has become durable (*acknowledged*). So a root that
has lost all commits differs from a root whose first commit was never completed.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.manifest import FORMAT, READERS, unknown_format
from hvdrecover.checkpoint.root import CLAIMS
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import EmptiedRootError, FencedError, OvertakenError, StorageError
from hvdrecover.machine import Clock, identity

_NAME = re.compile(r"g([0-9]{4,9})\.json")
_NO_CLAIM = f"{CLAIMS}/ holds no claim of this job, which has claimed the root before"
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("job", "maker", "host", "start", "process"), (str,)),
    **dict.fromkeys(("generation", "first", "after", "pid"), (int,)),
    "acknowledged": (bool,),
    "time": (float, int, type(None)),
}


@dataclass(frozen=True)
class Claim:
    """The claim of one generation. Old versions wrote only job, host, pid, time and acknowledged."""

    generation: int
    job: str  # identity of the job; empty if the claim is damaged
    acknowledged: bool
    first: int  # the generation under which the job's start took the root
    after: int = 0  # the newest earlier claim then; the maker has checked that claim and all before it
    maker: str = ""  # identity of the `Claims` object that made it
    host: str = ""
    pid: int = 0
    time: float | None = None
    start: str = ""
    process: str = ""  # the maker's `hvdrecover.machine.identity`; empty if unknown

    def text(self, *, acknowledged: bool) -> bytes:
        fields = {name: value for name, value in vars(self).items() if name != "generation"}
        return json.dumps({"format": FORMAT, **fields, "acknowledged": acknowledged}).encode()

    def describe(self) -> str:
        if not self.job:
            return f"a job whose claim {_path(self.generation)} is damaged"
        job, host = (re.sub(r"[^\w.:-]", "?", text) for text in (self.job[:8], self.host[:255]))
        return f"job {job} on {host or 'an unknown host'} (process {self.pid or 'unknown'})"


def among(names: Iterable[str]) -> list[int]:
    """Return the generations of the claims among file names, newest first."""
    found = {int(match[1]): match[0] for match in map(_NAME.fullmatch, names) if match}
    return sorted((claim for claim, name in found.items() if name == _name(claim)), reverse=True)


def read(storage: Storage, generation: int) -> Claim:
    """Read one claim. If it is damaged, its job is empty, and its generation counts as acknowledged."""
    path = _path(generation)
    try:
        text = root.read_note(storage, path)
        if not text and storage.size(path) is None:
            raise _gone(storage, f"{path} is gone")
        fields = json.loads(text)
        version = fields.get("format", 1)
        if type(version) is int and version not in READERS:
            raise unknown_format(f"{storage.url}/{path}", version)
        known = {name: value for name, value in fields.items() if name in _TYPES}
        defaults = {"first": generation, "start": fields["job"]}
        claim = Claim(**{**defaults, **known, "generation": generation})
        if any(type(value) not in _TYPES[name] for name, value in vars(claim).items()):
            raise TypeError("a field is of the wrong type")
        if not 0 <= claim.first <= generation or not 0 <= claim.after < generation:
            raise ValueError("a claim follows earlier ones")
        return claim
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Claim(generation, "", True, first=generation)


def deciding(storage: Storage, claimed: Sequence[int]) -> list[Claim]:
    """Return the claims that can still decide which start owns the root, newest first."""
    found: list[Claim] = []
    decided = 0
    for generation in claimed:
        if generation <= decided:
            break
        found.append(read(storage, generation))
        decided = max(decided, found[-1].first, found[-1].after)
    return found


def owner(found: Iterable[Claim]) -> Claim | None:
    """Return the newest claim of the start that took the root last; None without claims."""
    return max(found, key=lambda claim: (claim.first, claim.generation), default=None)


class Claims:
    """The claims of one root. All methods raise `StorageError` if the claims of this job are gone."""

    def __init__(self, storage: Storage, *, job: str, host: str, clock: Clock) -> None:
        self._storage = storage
        # JOB/START, the same on all ranks and after each recovery. Without a "/", each start is a job.
        self._job, _, start = job.partition("/")
        self._start = start or self._job
        self._host = host
        self._clock = clock
        self._maker = uuid.uuid4().hex
        self._ours: Claim | None = None  # the newest claim that this process has made
        self._acknowledged = 0

    def generations(self) -> list[int]:
        return among(self._storage.names(CLAIMS))

    def read(self, generation: int) -> Claim:
        return read(self._storage, generation)

    def take_after(self, generation: int, *, again: bool = False) -> int:
        """Claim a generation later than this one and than all claims, for a job that starts."""
        while True:
            claimed = self.generations()
            has_claimed = self._has_claimed(claimed, lambda claim: claim.job == self._job)
            # ``again``: an earlier start of this job has claimed the root.
            if again and not has_claimed:
                raise _gone(self._storage, _NO_CLAIM)
            newest = owner(deciding(self._storage, claimed))
            if newest is not None and newest.job != self._job and has_claimed:
                raise self._replaced(newest)
            # This process made the newest claim, perhaps in an earlier call that failed.
            if newest is not None and newest.generation == claimed[0] and newest.maker == self._maker:
                self._ours = newest
                return newest.generation
            generation = max([generation, *claimed]) + 1
            self._place(generation, generation, claimed, self._storage.create)

    def check_holds(self, left: Mapping[str, str]) -> None:
        """Raise `EmptiedRootError` if a start that left a near commit (``left`` says where) has no claim."""
        # A start that was replaced still has its claim.
        found = {self.read(generation).start for generation in self.generations()}
        if missing := [where for start, where in left.items() if start not in found]:
            raise EmptiedRootError(
                self._storage.url,
                f"the root was emptied or is not mounted: {CLAIMS}/ lacks the claim of the job that left "
                f"{missing[0]}. A job that starts from the beginning would overwrite that near commit. Mount "
                "or restore the root, and start the job again. If you emptied the root on purpose, first "
                "delete that folder on each host. If another container shares this host's memory and has "
                "another root of the same name, give each container its own HVDRECOVER_NEAR=FOLDER.",
            )

    def unreplaced(self) -> dict[str, int]:
        """Return the starts whose near commits this job may use, and the generation with which each began."""
        # These are all starts of this job, and of the last other job with durable commits. Jobs in between
        # that made no durable commit have not replaced that job, so they count as well.
        found = [self.read(generation) for generation in self.generations()]
        makers = {claim.job for claim in found if claim.acknowledged}
        jobs = {self._job}
        starts: dict[str, int] = {}
        for claim in sorted(found, key=lambda claim: (claim.first, claim.generation), reverse=True):
            if claim.job in makers - jobs:
                if len(jobs) > 1 or not claim.job:
                    break
                jobs.add(claim.job)
            if claim.start != self._start:
                starts[claim.start] = claim.first
        return starts

    def first_of(self, generation: int) -> int:
        """Return the generation under which the root was taken by the start that wrote this generation."""
        return self.read(generation).first if generation in self.generations() else generation

    def take(self, generation: int) -> None:
        """Claim a generation that this job has reached by a recovery. Raises as `check` does."""
        claimed = self.generations()
        is_first = self._ours is None and generation > 1
        if is_first and not self._has_claimed(claimed, lambda claim: claim.start == self._start):
            raise _gone(self._storage, _NO_CLAIM)
        newest = self._judge(claimed, generation)
        if self._ours is not None and self._ours.generation == generation:
            return
        first = generation if newest is None else newest.first
        if not self._place(generation, first, claimed, self._storage.create):
            found = self.read(generation)
            if newest is not None and found.job and found.first < newest.first:
                # A replaced process made this claim late, and it is void: put this process's in its place.
                self._place(generation, first, claimed, self._storage.publish)
        self.check(generation)
        if self._ours is None or self._ours.generation != generation:
            raise self._left_behind(self.read(generation))  # another process of this job was first

    def check(self, generation: int) -> None:
        """Raise `FencedError` if another job or a later generation of this one writes to the root."""
        self._judge(self.generations(), generation)

    def acknowledge(self, generation: int) -> None:
        """Check, and note in the claim that durable commits exist: a root without any must not look new."""
        # A start that claims after this look finds the commit complete, and keeps its files. Besides, another
        # process may have overwritten the claim on storage without exclusive creation.
        self.check(generation)
        if self._acknowledged != generation and self._ours is not None:
            self._storage.publish(_path(generation), self._ours.text(acknowledged=True))
            self._acknowledged = generation

    def _judge(self, claimed: Sequence[int], generation: int) -> Claim | None:
        """Do the work of `check`; return the newest claim of this start, or None if there are no claims."""
        if self._ours is not None and self._ours.generation not in claimed:
            raise _gone(self._storage, f"the claim {_path(self._ours.generation)} of this job is gone")
        found = deciding(self._storage, claimed)
        newest = owner(found)
        if newest is not None and newest.start != self._start:
            raise self._left_behind(newest) if newest.job == self._job else self._replaced(newest)
        for claim in found:
            # Another process of this start may have overwritten the claim that this process had made.
            ours = self._ours if self._ours and self._ours.generation == claim.generation else claim
            if claim.start == self._start and (claim.generation > generation or claim.maker != ours.maker):
                raise self._left_behind(claim)
        return newest

    def _has_claimed(self, claimed: Sequence[int], is_ours: Callable[[Claim], bool]) -> bool:
        """Return whether one of the claims is ours. Reads about two claims of each start."""
        low, high = 1, 0  # the range of claims that the last one read rules out
        for generation in claimed:
            if low <= generation <= high:
                continue
            claim = self.read(generation)
            if is_ours(claim):
                return True
            # From `first`, where its start took the root, to `after`, the last claim that it had checked, no
            # other start had the root.
            low, high = claim.first, claim.after
        return False

    def _place(
        self, generation: int, first: int, claimed: Sequence[int], write: Callable[[str, bytes], object]
    ) -> bool:
        """Write a claim; return whether this process owns it."""
        after = max((earlier for earlier in claimed if earlier < generation), default=0)
        maker = (self._maker, self._host, os.getpid(), self._clock.now(), self._start, identity())
        claim = Claim(generation, self._job, False, first, after, *maker)
        write(_path(generation), claim.text(acknowledged=False))
        # Read it back: the answer may get lost, and some stores let two processes create the same file.
        is_placed = self.read(generation).maker == self._maker
        if is_placed:
            self._ours = claim
        return is_placed

    def _replaced(self, newest: Claim) -> FencedError:
        by = newest.describe()
        return FencedError(
            self._storage.url,
            f"generation {newest.generation} has claimed this checkpoint root for {by}, so this process "
            "belongs to a job that was replaced and must stop. Each job needs its own checkpoint root.",
            by=by,
        )

    def _left_behind(self, newest: Claim) -> OvertakenError:
        return OvertakenError(
            self._storage.url,
            f"generation {newest.generation} of this same job ({newest.describe()}) has claimed this "
            "checkpoint root, so this process was left behind by a recovery or a restart, and must not write "
            "to it any more.",
        )


def _gone(storage: Storage, what: str) -> StorageError:
    remedy = "It is not created again. Bring it back, or start the job again."
    return StorageError(storage.url, f"{what}, so the root was deleted, emptied or unmounted. {remedy}")


def _name(generation: int) -> str:
    return f"g{generation:04d}.json"


def _path(generation: int) -> str:
    return f"{CLAIMS}/{_name(generation)}"
