"""The lines that the witnesses of one run have written, and which of them count; see `drill.witness`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hvdrecover.checkpoint.values import Json


@dataclass(frozen=True)
class Line:
    what: str  # agreed (on a commit to resume from), step, batch or commit
    time: float  # seconds of the monotonic clock, which all processes of a host share
    pid: int
    rank: int
    size: int
    generation: int  # of the last commit before the line
    commit: int
    # agreed: where the commit came from. step: its number since the commit.
    source: str = ""
    number: int = 0
    # batch: the samples of all ranks together, and the place in the epoch's order.
    sampler: str = ""
    epoch: int = 0
    at: int = 0
    samples: Sequence[int] = ()
    # commit: its number, and the steps and batches since the last one.
    made: int = 0
    steps: int = 0
    batches: int = 0
    tensors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # attribute, name: digest
    values: Mapping[str, Json] = field(default_factory=dict)  # attribute: the rest of it
    buffers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # model: its rank-local tensors
    samplers: Mapping[str, Json] = field(default_factory=dict)  # attribute: cursor, on rank 0
    virtual: int | None = None  # number of virtual ranks


class Reader:
    """Reads the witnesses' files in a folder; each look reads only lines that are new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._lines: list[Line] = []

    def look(self) -> Records:
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]  # the writer may be in the middle of a line
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            pid = int(path.stem.rpartition("-")[2])
            for each in complete.splitlines():
                self._lines.append(Line(pid=pid, **json.loads(each)))
        self._lines.sort(key=lambda line: line.time)
        return Records(tuple(self._lines))


@dataclass(frozen=True)
class Records:
    """All lines of a run, in order of time."""

    lines: tuple[Line, ...] = ()

    def of(self, what: str) -> list[Line]:
        return [line for line in self.lines if line.what == what]

    @cached_property
    def commits(self) -> list[Line]:
        return self.of("commit")

    @property
    def size(self) -> int:
        return self.rendezvouses[0][0].size

    @property
    def virtual(self) -> bool:
        """Return whether the script has virtual ranks: its result is the same on any number of ranks."""
        return any(line.virtual is not None for line in self.commits)

    @property
    def newest(self) -> int:
        return max((line.made for line in self.commits), default=0)

    @property
    def steps_repeated(self) -> int:
        """How many steps the job did again, as their commit was lost."""
        steps = self.of("step")
        kept = {id(line) for line in self.kept(steps)}
        return len({(each.generation, each.commit, each.number) for each in steps if id(each) not in kept})

    @property
    def present(self) -> list[Line]:
        """The lines of the ranks of the last rendezvous, since it began."""
        since = {line.pid: line.time for line in self.rendezvouses[-1]} if self.rendezvouses else {}
        return [line for line in self.lines if line.time >= since.get(line.pid, math.inf)]

    @property
    def reached(self) -> int:
        """The newest commit of the present ranks."""
        return max((line.commit for line in self.present), default=0)

    @property
    def rendezvouses(self) -> list[list[Line]]:
        """The lines of each rendezvous, in order of time."""
        return self._places[0]

    def rendezvous_of(self, line: Line) -> int:
        """Return the index of the last rendezvous of the line's process before the line."""
        return self._places[1][id(line)]

    @cached_property
    def _places(self) -> tuple[list[list[Line]], dict[int, int]]:
        """The rendezvouses, and the index of the rendezvous to which each line belongs.

        The generation alone does not identify a rendezvous: a job that was started again may count from an
        earlier one. All ranks of one rendezvous name the same generation, commit and size, each rank once.
        """
        found: list[list[Line]] = []
        last: dict[tuple[int, int, int], int] = {}  # the last rendezvous with this identity
        present: dict[int, int] = {}  # the rendezvous of each process
        places: dict[int, int] = {}
        for line in self.lines:
            if line.what == "agreed":
                identity = line.generation, line.commit, line.size
                place = last.get(identity)
                if place is None or any(line.rank == other.rank for other in found[place]):
                    place = last[identity] = len(found)
                    found.append([])
                found[place].append(line)
                present[line.pid] = place
            places[id(line)] = present.get(line.pid, 0)
        return found, places

    def kept(self, lines: Sequence[Line]) -> list[Line]:
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
        made: dict[int, Line] = {}
        for line in self.kept(self.commits):
            made.setdefault(line.made, line)  # of any rank: one may be killed before it writes its line
        found, far = {0: (0, 0, 0)}, (0, 0, 0)
        for number, line in sorted(made.items()):
            steps, batches, idle = far
            moved = line.steps or line.batches
            far = (steps + line.steps, batches + line.batches, 0 if moved else idle + 1)
            found[number] = far
        return found

    def train_since(self, since: float) -> bool:
        """Return whether the last rendezvous began after a time, and all its ranks have begun a step."""
        return any(_began(ranks) > since and self.stepped(ranks) for ranks in self.rendezvouses[-1:])

    def stepped_since(self, since: float) -> float | None:
        """Return when all ranks had begun a step after the first complete rendezvous since a time."""
        later = (self.stepped(ranks) for ranks in self.rendezvouses if _began(ranks) > since)
        return next(filter(None, later), None)

    def stepped(self, rendezvous: Sequence[Line]) -> float | None:
        """Return when all ranks had begun a step after a rendezvous; None if a rank has not."""
        first: dict[int, float] = {}
        since = {line.pid: line.time for line in rendezvous}
        for line in self.lines:
            if line.what in ("step", "batch") and line.time > since.get(line.pid, math.inf):
                first.setdefault(line.pid, line.time)
        return max(first.values()) if len(first) == rendezvous[0].size else None


def _began(rendezvous: Sequence[Line]) -> float:
    return min(line.time for line in rendezvous)
