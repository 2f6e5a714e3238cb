"""The lines of one run's witnesses, and which of them count; see `hvdrecover.drill.witness`."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hvdrecover.checkpoint.values import Json


@dataclass(frozen=True)
class Line:
    """The facts that each line has.

    Attributes:
        time: seconds of the monotonic clock, which all processes of a host share.
        pid: the process.
        rank: its rank.
        size: number of ranks.
        generation: generation of the last commit before the line.
        commit: number of that commit.
    """

    time: float
    pid: int
    rank: int
    size: int
    generation: int
    commit: int


@dataclass(frozen=True)
class Agreed(Line):
    """The ranks have agreed on a commit; ``source`` is ``initial``, ``memory`` or another."""

    source: str


@dataclass(frozen=True)
class Changed(Line):
    """The changes that the script made between a rendezvous and its first step.

    Attributes:
        tensors: attribute to the names of its changed tensors.
        values: attribute to its value before and after.
    """

    tensors: Mapping[str, Sequence[str]]
    values: Mapping[str, Sequence[Json]]


@dataclass(frozen=True)
class Step(Line):
    """The ``number``-th step since the commit begins; ``inputs`` is the digest of the batch, if known."""

    number: int
    inputs: str | None


@dataclass(frozen=True)
class Batch(Line):
    """All ranks together train on ``samples``, which begin at place ``at`` of the epoch's order.

    ``inputs`` is the digest of the part that this rank's data set returned, if known.
    """

    sampler: str
    epoch: int
    at: int
    samples: Sequence[int]
    inputs: str | None = None


@dataclass(frozen=True)
class Commit(Line):
    """A commit was made.

    Attributes:
        made: its number.
        steps: steps since the last commit.
        batches: recorded batches since the last commit.
        tensors: attribute to tensor to digest.
        values: attribute to its value, tensors left out.
        buffers: attribute of a model to the names of its rank-local tensors.
        samplers: attribute to cursor; empty on ranks other than 0.
        virtual: number of virtual ranks, or None.
    """

    made: int
    steps: int
    batches: int
    tensors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)
    buffers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    samplers: Mapping[str, Json] = field(default_factory=dict)
    virtual: int | None = None


L = TypeVar("L", bound=Line)
_KINDS: dict[str, type[Line]] = {
    "agreed": Agreed,
    "changed": Changed,
    "step": Step,
    "batch": Batch,
    "commit": Commit,
}


class Reader:
    """Reads the files of a folder of witnesses; each look reads only lines that are new.

    Attributes:
        lines: all lines so far, in order of time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.lines: list[Line] = []

    def look(self) -> Records:
        """Read the new lines, and return all of them."""
        before = len(self.lines)
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]  # the writer may be in the middle of a line
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            pid = int(path.stem.rpartition("-")[2])
            self.lines += [_line(pid, json.loads(each)) for each in complete.splitlines()]
        if len(self.lines) > before:
            self.lines.sort(key=lambda line: line.time)
        return Records.of(self.lines)


def _line(pid: int, facts: dict[str, Any]) -> Line:
    return _KINDS[facts.pop("what")](pid=pid, **facts)


@dataclass(frozen=True)
class Records:
    """All lines of a run by kind, each kind in order of time."""

    agreed: tuple[Agreed, ...]
    changed: tuple[Changed, ...]
    steps: tuple[Step, ...]
    batches: tuple[Batch, ...]
    commits: tuple[Commit, ...]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Records:
        """Sort lines by kind."""
        return cls(
            tuple(line for line in lines if isinstance(line, Agreed)),
            tuple(line for line in lines if isinstance(line, Changed)),
            tuple(line for line in lines if isinstance(line, Step)),
            tuple(line for line in lines if isinstance(line, Batch)),
            tuple(line for line in lines if isinstance(line, Commit)),
        )

    @property
    def virtual(self) -> bool:
        """Return whether the script has virtual ranks: its result is the same on any number of ranks."""
        return any(line.virtual is not None for line in self.commits)

    @property
    def newest(self) -> int:
        """The number of the newest commit; 0 without commits."""
        return max((line.made for line in self.commits), default=0)

    @property
    def steps_repeated(self) -> int:
        """How many steps the job did again, as their commit was lost."""
        kept = {id(line) for line in self.kept(self.steps)}
        lost = {(each.generation, each.commit, each.number) for each in self.steps if id(each) not in kept}
        return len(lost)

    @cached_property
    def rendezvouses(self) -> list[list[Agreed]]:
        """The lines of each rendezvous, in order of time.

        The generation alone does not identify a rendezvous: a job that was started again may count from an
        earlier one. All ranks of one rendezvous name the same generation, commit and size, each rank once.
        """
        found: list[list[Agreed]] = []
        for line in self.agreed:
            same = (ranks for ranks in reversed(found) if _identity(ranks[0]) == _identity(line))
            ranks = next(same, None)
            if ranks is None or any(line.rank == other.rank for other in ranks):
                found.append(ranks := [])
            ranks.append(line)
        return found

    def rendezvous_of(self, line: Line) -> int:
        """Return the index of the last rendezvous of the line's process before the line."""
        places = self._places[line.pid]
        return places[max(0, bisect.bisect_right(places, line.time, key=lambda each: each[0]) - 1)][1]

    @cached_property
    def _places(self) -> dict[int, list[tuple[float, int]]]:
        """For each process the times and indices of its rendezvous."""
        places: dict[int, list[tuple[float, int]]] = {}
        for place, rendezvous in enumerate(self.rendezvouses):
            for line in rendezvous:
                places.setdefault(line.pid, []).append((line.time, place))
        return {pid: sorted(each) for pid, each in places.items()}

    def kept(self, lines: Sequence[L]) -> list[L]:
        """Return the lines that are part of the final state.

        Work after commit ``k`` is lost if the ranks later resumed from ``k`` or an earlier commit.
        """
        least, later = [math.inf] * len(self.rendezvouses), math.inf
        for place in range(len(self.rendezvouses) - 1, -1, -1):
            least[place] = later
            later = min(later, self.rendezvouses[place][0].commit)
        return [line for line in lines if line.commit < least[self.rendezvous_of(line)]]

    @cached_property
    def progress(self) -> dict[int, tuple[int, int, int]]:
        """For each commit: steps and batches since the start, and how many commits without work precede it.

        The number of a commit does not tell: when hosts come or go, the ranks make one more commit.
        """
        made: dict[int, Commit] = {}
        for line in self.kept(self.commits):
            made.setdefault(line.made, line)  # of any rank: one may be killed before it writes its line
        found, far = {0: (0, 0, 0)}, (0, 0, 0)
        for number, line in sorted(made.items()):
            steps, batches, idle = far
            moved = line.steps or line.batches
            far = (steps + line.steps, batches + line.batches, 0 if moved else idle + 1)
            found[number] = far
        return found

    def stepped(self, rendezvous: Sequence[Agreed]) -> float | None:
        """Return when all ranks had begun a step after a rendezvous; None if a rank has not."""
        if len(rendezvous) < rendezvous[0].size:
            return None
        first = [self._first_step(line) for line in rendezvous]
        return None if None in first else max(filter(None, first))

    def stepped_since(self, since: float) -> float | None:
        """Return when all ranks had begun a step after the first complete rendezvous since a time."""
        later = (each for each in self.rendezvouses if min(line.time for line in each) > since)
        return next(filter(None, map(self.stepped, later)), None)

    def train_since(self, since: float) -> bool:
        """Return whether the last rendezvous began after a time, and all its ranks have begun a step."""
        if not self.rendezvouses:
            return False
        last = self.rendezvouses[-1]
        return min(line.time for line in last) > since and self.stepped(last) is not None

    def _first_step(self, since: Line) -> float | None:
        lines: list[Iterable[Line]] = [self.steps, self.batches]
        first = (
            next((each.time for each in kind if each.pid == since.pid and each.time > since.time), None)
            for kind in lines
        )
        return min(filter(None, first), default=None)


def _identity(line: Agreed) -> tuple[int, int, int]:
    return line.generation, line.commit, line.size
