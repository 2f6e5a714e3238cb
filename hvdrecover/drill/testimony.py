"""The reports of the witnesses of one run; see `hvdrecover.drill.witness`."""

from __future__ import annotations

import bisect
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hvdrecover.checkpoint.values import Json
from hvdrecover.reporting.following import Lines


@dataclass(frozen=True)
class Line:
    """The facts that all lines have.

    Attributes:
        time: seconds of the monotonic clock, which all processes of a host share.
        pid: the process.
        rank: its rank.
        size: number of ranks.
        generation: of the commit that it came after.
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
    """The ranks have agreed on a commit to resume from; ``source`` is where it came from."""

    source: str


@dataclass(frozen=True)
class Changed(Line):
    """The changes between an agreement and the first step after it.

    Attributes:
        tensors: attribute to the names of its tensors.
        values: attribute to what it was and what it is, apart from tensors.
    """

    tensors: Mapping[str, Sequence[str]]
    values: Mapping[str, Sequence[Json]]


@dataclass(frozen=True)
class Step(Line):
    """A step begins: the ``number``-th since the commit, on ``inputs``, if their digest is known."""

    number: int
    inputs: str | None


@dataclass(frozen=True)
class Batch(Line):
    """All ranks together have done ``samples``, from place ``at`` of the order of an epoch on.

    The rank's data set dealt it ``inputs`` of them, if their digest is known.
    """

    sampler: str
    epoch: int
    at: int
    samples: Sequence[int]
    inputs: str | None = None


@dataclass(frozen=True)
class Made(Line):
    """A commit was made.

    Attributes:
        made: its number.
        steps: steps since the last one.
        batches: recorded batches since the last one.
        loss: mean of those that the rank was told since the last one; None if it was told none.
        tensors: attribute to name to digest.
        values: attribute to what it is apart from tensors.
        buffers: attribute of a model or the like to names of tensors that each rank has its own of.
        samplers: attribute to cursor; empty on ranks other than 0.
        virtual: number of virtual ranks; None if the script has none.
    """

    made: int
    steps: int
    batches: int
    loss: float | None = None
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
    "commit": Made,
}


class Witnesses:
    """Follows the files of a folder while processes append to them.

    Args:
        folder: the folder; it may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._files: Lines[dict[str, Any]] = Lines(folder, json.loads, longest=sys.maxsize)
        self.lines: list[Line] = []

    def look(self) -> list[Line]:
        """Read what was appended since the last look; all lines so far, in order of time."""
        new = self._appended()
        while self._files.behind:
            new += self._appended()
        if new:
            self.lines = sorted([*self.lines, *new], key=lambda line: line.time)
        return self.lines

    def _appended(self) -> list[Line]:
        return [_line(Path(path), facts) for path, facts in self._files.look()]


def _line(path: Path, facts: dict[str, Any]) -> Line:
    return _KINDS[facts.pop("what")](pid=int(path.stem.rpartition("-")[2]), **facts)


@dataclass(frozen=True)
class Testimony:
    """All that the witnesses of a run have told, by kind, each in order of time."""

    __test__ = False  # or pytest would take it for a class of tests

    agreed: tuple[Agreed, ...]
    changed: tuple[Changed, ...]
    steps: tuple[Step, ...]
    batches: tuple[Batch, ...]
    commits: tuple[Made, ...]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Testimony:
        """Sort lines by kind."""
        return cls(
            tuple(line for line in lines if isinstance(line, Agreed)),
            tuple(line for line in lines if isinstance(line, Changed)),
            tuple(line for line in lines if isinstance(line, Step)),
            tuple(line for line in lines if isinstance(line, Batch)),
            tuple(line for line in lines if isinstance(line, Made)),
        )

    @property
    def virtual(self) -> bool:
        """Return whether the script has virtual ranks, and so one result on any number of ranks."""
        return any(line.virtual is not None for line in self.commits)

    @cached_property
    def rendezvouses(self) -> list[list[Agreed]]:
        """Return who agreed with whom, in order of time.

        Generations do not tell rendezvous apart: a job that starts anew may count from an earlier one again.
        But ranks of one rendezvous name the same generation, commit and size, and each is there once.
        """
        found: list[list[Agreed]] = []
        for line in self.agreed:
            same = (ranks for ranks in reversed(found) if _place(ranks[0]) == _place(line))
            ranks = next(same, None)
            if ranks is None or any(line.rank == other.rank for other in ranks):
                found.append(ranks := [])
            ranks.append(line)
        return found

    def kept(self, lines: Sequence[L]) -> list[L]:
        """Those lines that are part of what the run has come to.

        What was done after commit ``k`` is lost if ranks later resumed from ``k`` or an earlier commit.
        """
        least, later = [math.inf] * len(self.rendezvouses), math.inf
        for place in range(len(self.rendezvouses) - 1, -1, -1):
            least[place] = later
            later = min(later, self.rendezvouses[place][0].commit)
        return [line for line in lines if line.commit < least[self.rendezvous_of(line)]]

    @cached_property
    def progress(self) -> dict[int, tuple[int, int, int]]:
        """Return how far the run had come at each of its commits, by number.

        Numbers alone would not tell: when hosts come or go, ranks commit once more than undisturbed.

        Returns:
            Steps and batches since the run's beginning, and how many commits there were since the last one.
        """
        made: dict[int, Made] = {}
        for line in self.kept(self.commits):
            made.setdefault(line.made, line)  # a rank may be killed before it tells
        found, far = {0: (0, 0, 0)}, (0, 0, 0)
        for number, line in sorted(made.items()):
            steps, batches, idle = far
            moved = line.steps or line.batches
            far = (steps + line.steps, batches + line.batches, 0 if moved else idle + 1)
            found[number] = far
        return found

    @property
    def newest(self) -> int:
        """The number of the newest commit."""
        return max((line.made for line in self.commits), default=0)

    def stepped(self, rendezvous: Sequence[Agreed]) -> float | None:
        """Return when all ranks had stepped after a rendezvous; None if some have not, or are missing."""
        if len(rendezvous) < rendezvous[0].size:
            return None
        first = [self._first_step(line) for line in rendezvous]
        return None if None in first else max(filter(None, first))

    def stepped_again(self, since: float) -> float | None:
        """Return when all ranks had stepped after the first rendezvous since a time, if there was one."""
        later = (each for each in self.rendezvouses if min(line.time for line in each) > since)
        return next(filter(None, map(self.stepped, later)), None)

    def _first_step(self, since: Line) -> float | None:
        lines: list[Iterable[Line]] = [self.steps, self.batches]
        first = (
            next((each.time for each in kind if each.pid == since.pid and each.time > since.time), None)
            for kind in lines
        )
        return min(filter(None, first), default=None)

    def rendezvous_of(self, line: Line) -> int:
        """The place among the rendezvous of the one that the line's process was at last."""
        places = self._places[line.pid]
        return places[max(0, bisect.bisect_right(places, line.time, key=lambda each: each[0]) - 1)][1]

    @cached_property
    def _places(self) -> dict[int, list[tuple[float, int]]]:
        """Process to the times of its rendezvous, and their places."""
        places: dict[int, list[tuple[float, int]]] = {}
        for place, rendezvous in enumerate(self.rendezvouses):
            for line in rendezvous:
                places.setdefault(line.pid, []).append((line.time, place))
        return {pid: sorted(each) for pid, each in places.items()}


def _place(line: Agreed) -> tuple[int, int, int]:
    return line.generation, line.commit, line.size
