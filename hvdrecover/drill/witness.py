"""The witness of a drill: it records the work of each training process, and makes the process fail on demand.

``HVDRECOVER_INSTRUMENTS`` names this module in the processes of a drill. The layers below do not know the
drill.

1. The `Witness` of a process appends a line of JSON to ``FOLDER/witness/HOST-PID.jsonl`` for each agreement,
   step, batch and commit.
2. The drill's `Reader` reads these files. `Records` sorts the lines by rendezvous, and tells which count.
3. To make rank R fail at its next step, the drill writes ``loop``, ``out-of-memory`` or ``script-error`` to
   ``FOLDER/orders/R``. The checkpoint root fails while ``FOLDER/orders/storage`` says ``away`` or ``full``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.store import Store
from hvdrecover.checkpoint.values import Json
from hvdrecover.data.order import SampleOrder
from hvdrecover.events import Events
from hvdrecover.state.hooks import Agreement, Context, Hook

_PIECE = 1 << 26  # bytes that a process takes at a time until it has no memory left


# -- in a training process -----------------------------------------------------------------------------


def observers(context: Context) -> tuple[Hook, ...]:
    return (Witness(context),)


class Witness(Hook):
    def __init__(self, context: Context) -> None:
        assert context.config.drill is not None
        self._folder = context.config.drill
        self._context = context
        self._contents = context.contents
        self._world = context.world
        self._descriptor: int | None = None
        self._at = (0, 0)
        self._steps = self._batches = 0
        self._contents.on_record.append(self.recorded)
        self._context.framework.report("steps", self)
        _have_storage_fail(self._folder)

    def agreed(self, agreement: Agreement) -> None:
        """Record a commit to resume from; store an initial state, so that other runs can begin with it."""
        snapshot = agreement.snapshot
        if agreement.source == "initial" and self._world.rank() == 0:
            self._store(snapshot)
        self._stand_at(snapshot)
        self._write("agreed")

    def step_begins(self) -> None:
        self._steps += 1
        self._write("step", number=self._steps)
        self._follow_order()

    def recorded(self, order: SampleOrder, count: int) -> None:
        self._batches += 1
        name = next((name for name, each in self._contents.orders.items() if each is order), "")
        samples = order.remaining()[: count * order.size].tolist()
        self._write("batch", sampler=name, epoch=order.epoch, at=order.done, samples=samples)
        self._follow_order()

    def captured(self, snapshot: Snapshot) -> None:
        tensors = {
            attribute: {
                spec.name: xxhash.xxh3_64_hexdigest(arena.bytes_of(spec.name).data)
                for spec in arena.layout.specs
            }
            for attribute, arena in snapshot.arenas.items()
        }
        self._write(
            "commit",
            made=snapshot.id.commit,
            steps=self._steps,
            batches=self._batches,
            tensors=tensors,
            values=snapshot.state["attributes"],
            buffers={name: sorted(names) for name, names in self._contents.rank_local().items()},
            samplers=snapshot.state["samplers"] if self._world.rank() == 0 else {},
            virtual=self._context.ranks.virtual,
        )
        self._stand_at(snapshot)

    def _stand_at(self, snapshot: Snapshot) -> None:
        self._at = (snapshot.id.generation, snapshot.id.commit)
        self._steps = self._batches = 0

    def _store(self, snapshot: Snapshot) -> None:
        storage, host = open_storage(os.fspath(self._folder / "initial")), self._context.config.host
        clock = self._context.clock
        store = Store(storage, keep=1, job="drill", host=host, events=Events(None, host, clock), clock=clock)
        store.claims.take_after(snapshot.id.generation - 1)
        store.write(snapshot, 0)

    def _write(self, what: str, **facts: Any) -> None:
        (generation, commit), now = self._at, self._context.clock.monotonic()
        place = {"rank": self._world.rank(), "size": self._world.size()}
        line = {"what": what, "time": now, **place, "generation": generation, "commit": commit, **facts}
        if self._descriptor is None:
            path = self._folder / "witness" / f"{self._context.config.host}-{os.getpid()}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(self._descriptor, f"{json.dumps(line)}\n".encode())

    def _follow_order(self) -> None:
        """Fail as the drill has asked this rank to, once."""
        order = self._folder / "orders" / str(self._world.rank())
        try:
            action = order.read_text()
            order.unlink()  # first, or the next process of this rank would fail, too
        except FileNotFoundError:
            return
        if action == "script-error":
            raise RuntimeError("an error in the training script, raised by hvdrecover drill")
        taken = []
        if action == "out-of-memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = used + 4 * _PIECE
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        while True:
            if action == "out-of-memory":
                taken.append(b"x" * _PIECE)


def _have_storage_fail(folder: Path) -> None:
    """Have the run's checkpoint root follow the drill's order: ``away`` fails every call, ``full`` writes."""
    usual, order = LocalStorage._failures, folder / "orders" / "storage"

    @contextmanager
    def failures(storage: LocalStorage, path: str, action: str) -> Iterator[None]:
        with usual(storage, path, action):
            is_root = storage.url.endswith(f"://{folder / 'checkpoint'}")
            behaviour = order.read_text() if is_root and order.exists() else "well"
            if behaviour == "away":
                raise ConnectionError(errno.ECONNREFUSED, "the storage is away (simulated by a drill)")
            if behaviour == "full" and action in ("write the file", "create the file"):
                raise OSError(errno.ENOSPC, "No space left on device (simulated by a drill)")
            yield

    LocalStorage._failures = failures  # type: ignore[assignment]


# -- in the drill --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    what: str  # agreed (on a commit to resume from), step, batch or commit
    time: float  # seconds of the monotonic clock, which all processes of a host share
    pid: int
    rank: int
    size: int
    generation: int  # of the last commit before the line
    commit: int
    number: int = 0  # of a step, since the commit
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
            self._lines += [Line(pid=pid, **json.loads(each)) for each in complete.splitlines()]
        self._lines.sort(key=lambda line: line.time)
        return Records(tuple(self._lines))


@dataclass
class Rendezvous:
    """Ranks that agreed on a commit to resume from, and all their lines until the next rendezvous."""

    agreed: list[Line] = field(default_factory=list)  # at least one, and one of each rank at most
    lines: list[Line] = field(default_factory=list)
    lost_from: float = math.inf  # the first commit whose later work a later rendezvous has lost

    @property
    def began(self) -> float:
        return self.agreed[0].time

    @property
    def stepped(self) -> float | None:
        """When all ranks had begun a step; None if a rank has not."""
        first: dict[int, float] = {}
        for line in self.lines:
            if line.what in ("step", "batch"):
                first.setdefault(line.rank, line.time)
        return max(first.values()) if len(first) == self.agreed[0].size else None


@dataclass(frozen=True)
class Records:
    """All lines of a run, in order of time."""

    lines: tuple[Line, ...] = ()

    @cached_property
    def rendezvouses(self) -> list[Rendezvous]:
        found: list[Rendezvous] = []
        last: dict[tuple[int, int, int], Rendezvous] = {}  # the last one with this identity
        present: dict[int, Rendezvous] = {}  # the rendezvous of each process
        for line in self.lines:
            if line.what == "agreed":
                # The generation is not enough: a job that is started again may count from an earlier one.
                identity = line.generation, line.commit, line.size
                joined = last.get(identity)
                if joined is None or any(line.rank == other.rank for other in joined.agreed):
                    joined = last[identity] = Rendezvous()
                    found.append(joined)
                joined.agreed.append(line)
                present[line.pid] = joined
            if line.pid in present:  # a script may step before it calls `resume`
                present[line.pid].lines.append(line)
        lost_from = math.inf
        for rendezvous in reversed(found):
            rendezvous.lost_from = lost_from
            lost_from = min(lost_from, rendezvous.agreed[0].commit)
        return found

    def kept(self, what: str) -> list[Line]:
        """Return the lines of a kind that are part of the final state."""
        lines = ((line, each.lost_from) for each in self.rendezvouses for line in each.lines)
        return [line for line, lost_from in lines if line.what == what and line.commit < lost_from]

    @property
    def steps_repeated(self) -> int:
        """How many steps the job did again, as their commit was lost."""
        lines = ((line, each.lost_from) for each in self.rendezvouses for line in each.lines)
        lost = (line for line, lost_from in lines if line.what == "step" and line.commit >= lost_from)
        return len({(line.generation, line.commit, line.number) for line in lost})

    @cached_property
    def newest(self) -> int:
        return max((line.made for line in self.lines if line.what == "commit"), default=0)

    @cached_property
    def virtual(self) -> bool:
        """Whether the script has virtual ranks: its result is the same on any number of ranks."""
        return any(line.virtual is not None for line in self.lines)

    @property
    def present(self) -> list[Line]:
        return self.rendezvouses[-1].lines if self.rendezvouses else []

    @property
    def reached(self) -> int:
        return max((line.commit for line in self.present), default=0)

    @cached_property
    def progress(self) -> dict[int, tuple[int, int, int]]:
        """For each commit: steps and batches since the start, and how many idle commits precede it."""
        # A commit's number does not tell: when hosts come or go, the ranks make one more commit.
        made: dict[int, Line] = {}
        for line in self.kept("commit"):
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
        return any(each.began > since and each.stepped is not None for each in self.rendezvouses[-1:])

    def stepped_since(self, since: float) -> float | None:
        """Return when all ranks had begun a step after the first complete rendezvous since a time."""
        times = (each.stepped for each in self.rendezvouses if each.began > since)
        return next((time for time in times if time is not None), None)
